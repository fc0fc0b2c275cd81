"""Makes process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def new_group(
    ranks: Sequence[int], *, by_members: bool = False, backend: str | None = None, urgent: bool = False
) -> dist.ProcessGroup | None:
    """A process group of some ranks; None on another rank. Collective over the job, or, ``by_members``, over the group.

    ``urgent``: over NCCL, whose stream there has a high priority.

    It is never split from the default group. Torch does that where the program has bound that one to a GPU
    (``device_id``), and NCCL then waits for all ranks of the job, whoever is to make the group, and over whatever.
    """
    options: dict[str, Any] = {}
    if urgent:
        options = {"backend": "nccl", "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}
    elif backend is not None:
        options = {"backend": backend}
    default: Any = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if bound is None:
        return dist.new_group(list(ranks), use_local_synchronization=by_members, **options)
    default.bound_device_id = None
    try:
        return dist.new_group(list(ranks), use_local_synchronization=by_members, **options)
    finally:
        default.bound_device_id = bound
