"""Gathers vectors with one number per channel from their shards to every rank, many vectors in one exchange."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.layouts import owners
from distconv.transfer.collectives import all_gathered
from distconv.transfer.group import joint_group, joint_order
from distconv.transfer.tracing import constant, planned


class _Gathered(NamedTuple):
    """The gathering of vectors, sharded over some axes, to every rank in one exchange."""

    group: dist.ProcessGroup | None
    ranks: int
    padding: int  # Elements behind what this rank has, so that all ranks send as many.
    places: Tensor  # For each element of the whole vectors in order, its position in the data that all ranks sent.


def gathered(mesh: DeviceMesh, axes: tuple[int, ...], values: list[Tensor], channels: tuple[int, ...]) -> list[Tensor]:
    """Whole vectors from this rank's shards of them. Collective."""
    plan = _plan(mesh, axes, channels, values[0].device)
    own = torch.cat([*values, values[0].new_zeros(plan.padding)] if plan.padding else values)
    whole = all_gathered(own, plan.ranks, plan.group).index_select(0, constant(plan.places, own))
    return list(whole.split(channels))


@planned(1024)
def _plan(mesh: DeviceMesh, axes: tuple[int, ...], channels: tuple[int, ...], device: torch.device) -> _Gathered:
    order, here = joint_order(mesh, axes)
    owned = [[(stop - start) for start, stop in owners(mesh, axes, extent)] for extent in channels]
    each = [sum(own[at] for own in owned) for at in range(len(order))]
    longest = max(each)
    index: list[int] = []
    starts = {at: member * longest for member, at in enumerate(order)}
    for own in owned:
        for at, extent in enumerate(own):
            index += range(starts[at], starts[at] + extent)
            starts[at] += extent
    padding = longest - each[order[here]]
    return _Gathered(joint_group(mesh, axes), len(order), padding, torch.tensor(index, device=device))
