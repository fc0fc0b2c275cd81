"""Makes process groups, and numbers the jobs of a program, each of which lasts as long as its default group."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distconv.tensors import hooks
from distconv.tensors.replacements import replace, until_put_back


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


_jobs: dict[Any, tuple[int, int]] = {}
"""By the default groups of jobs that have meshes: their numbers, and the threads that made the first mesh."""

_numbers = itertools.count()


def number_of(job: Any) -> int:
    """The number of a job, by its default group, among those of this process that have had meshes."""
    _watch()
    if job not in _jobs:
        thread = threading.get_ident()  # each part in turn has a job of its own
        for former in [each for each, (_, its) in _jobs.items() if its == thread]:
            _end(former)  # its groups were destroyed after distconv.shutdown
        _jobs[job] = next(_numbers), thread
    return _jobs[job][0]


@until_put_back
def _watch() -> None:
    stock: Any = dist.ProcessGroup.shutdown

    @functools.wraps(stock)
    def shutdown(group: Any) -> None:
        stock(group)
        _end(group)

    replace(dist.ProcessGroup, "shutdown", shutdown)


def _end(job: Any) -> None:
    if _jobs.pop(job, None):
        for forget in hooks.after_jobs:
            forget(job)
        gc.collect()  # plans, and the layouts that they are kept with, refer to each other
