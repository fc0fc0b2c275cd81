"""Selects the GPU of its machine on which a rank computes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from distconv.place import find_place


def take_gpu() -> None:
    """Makes one GPU of the machine this process's current one, by its rank among the machine's ranks.

    Ranks beyond the number of GPUs share them. A GPU other than the first that the program has made current stays, as
    does one that the process group was bound to. It must happen before anything is sent: NCCL takes the current GPU,
    and torch's DeviceMesh chooses none once CUDA is in use.
    """
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return
    if dist.is_initialized():
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.type == "cuda":
            torch.cuda.set_device(bound)
            return
    place = find_place(os.environ)
    alone = dist.get_rank() if dist.is_initialized() else 0
    local = alone if place is None else place.local_rank
    torch.cuda.set_device(local % torch.cuda.device_count())
