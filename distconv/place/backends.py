"""The backend of a job in which every rank may have a GPU of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def agreed_backend(store: Store, rank: int, size: int) -> str:
    """The backend of ranks that share a store: "nccl" or "gloo", the same on all of them. Collective over them.

    Each has made its GPU the current one.
    """
    key = "distconv/gpu of {}".format
    store.set(key(rank), _own_gpu())
    return backend_of([store.get(key(other)).decode() for other in range(size)])


def backend_of(gpus: Sequence[str]) -> str:
    """NCCL where each rank has a GPU of its own, since it refuses two ranks on one; else Gloo.

    ``gpus``: what identifies each rank's; empty for a rank that has none.
    """
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def _own_gpu() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
