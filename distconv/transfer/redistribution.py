"""Redistributes a tensor, on one mesh or between two over the same ranks, by one collective and with the fewest bytes.

Under either layout a rank owns a box of the tensor, and the distinct boxes are disjoint. A rank keeps the elements that
it owned and still needs, and receives each other one once, from one of the ranks that owned it. All ranks compute this
from the two layouts, so no message is needed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.settings.partition import Partition, flat_index
from distconv.tensors.autograd_nodes import LAYOUT_CHANGES
from distconv.tensors.dtensors import memory_format, wrap
from distconv.tensors.layouts import added_up, boxes_along, dim_axes, owners, replicated
from distconv.tensors.mesh import is_ours, mesh_like, placements, ranks_of, whole_group
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.collectives import MAX, MIN, PRODUCT, SUM, all_reduced
from distconv.transfer.exchange import Exchanges, exchange
from distconv.transfer.group import joint_group
from distconv.transfer.needs import window
from distconv.transfer.route import Route, per_peer, unpacked
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval, intersect, length

Box = tuple[Interval, ...]  # An interval of every dim.


@dataclass(frozen=True)
class RedistributionPlan:
    """One rank's share of a redistribution. Boxes of ``sends`` count from the start of its old box, those of
    ``receives`` from the start of its new one; ``kept`` gives one of each. Members are numbered from 0."""

    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]
    kept: tuple[Box, Box] | None
    silent: bool  # Nothing moves between any two members.


def make_redistribution_plan(before: Sequence[Box], after: Sequence[Box], member: int) -> RedistributionPlan:
    """The plan of ``member``: what it sends, receives and keeps. Member i owns ``before[i]`` and needs ``after[i]``.

    Where several members own the same box, they take turns to send it, so that none of them sends all of it.
    """
    owners: dict[Box, list[int]] = {}
    for index, box in enumerate(before):
        if volume(box):
            owners.setdefault(box, []).append(index)
    mine, wanted = before[member], after[member]
    sharing = owners.get(mine, ())
    sends = [
        (needing, _within(common, mine))
        for needing, box in enumerate(after)
        if sharing and sharing[needing % len(sharing)] == member and before[needing] != mine
        if (common := overlap(mine, box)) is not None
    ]
    receives = sorted(
        (sources[member % len(sources)], _within(common, wanted))
        for box, sources in owners.items()
        if box != mine and (common := overlap(box, wanted)) is not None
    )
    common = overlap(mine, wanted)
    kept = None if common is None else (_within(common, mine), _within(common, wanted))
    # Every element is in some box of before, so a member that has not all it needs gets the rest from others.
    silent = all(overlap(old, new) == (new if volume(new) else None) for old, new in zip(before, after, strict=True))
    return RedistributionPlan(tuple(sends), tuple(receives), kept, silent)


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(length(interval) for interval in box)


def overlap(box: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    common = tuple(intersect(a, b) for a, b in zip(box, other, strict=True))
    return common if volume(common) else None


def _within(box: Box, outer: Box) -> Box:
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def boxes(mesh: DeviceMesh, layout: Sequence[Placement], shape: Sequence[int]) -> dict[int, Box]:
    """{rank: the box of a tensor of ``shape`` that it owns}."""
    return dict(zip(mesh.mesh.flatten().tolist(), boxes_along(mesh, layout, shape, range(mesh.ndim)), strict=True))


class Redistribution:
    """A plan bound to the group of all ranks of a mesh, a transfer. Make it with :func:`redistribution`."""

    def __init__(
        self,
        plan: RedistributionPlan,
        shape: tuple[int, ...],
        group: dist.ProcessGroup | None,
        size: int,
        opposite: Callable[[], Redistribution],
        shared: bool,
    ) -> None:
        """``shared``: whether several ranks own the same box afterwards."""
        self.plan, self.shape, self._opposite, self._shared = plan, shape, opposite, shared
        sent, received = (
            per_peer(((member, volume(box)) for member, box in moves), size) for moves in (plan.sends, plan.receives)
        )
        self.route = Route(sent, received, group)

    def __repr__(self) -> str:
        return f"Redistribution({self.plan}, shape={self.shape})"

    def adjoint(self, grad: Tensor) -> Tensor:
        """This rank's gradient under the old layout from that under the new one: the redistribution back, as a
        replicated gradient counts once."""
        return self._opposite().fetch(grad)

    def fetch(self, local: Tensor) -> Tensor:
        """This rank's part under the new layout from its part under the old one."""
        plan = self.plan
        if plan.silent and plan.kept is not None and plan.kept[0] == plan.kept[1] and local.shape == self.shape:
            return local
        # Where an extent is 1, shards may differ in their strides. Ranks with the same box give it the same strides,
        # so that what they compute of it, such as its sum, has the same bits.
        form = torch.contiguous_format if self._shared else memory_format(local)
        result = torch.empty(self.shape, dtype=local.dtype, device=local.device, memory_format=form)
        if plan.kept is not None:
            _inside(result, plan.kept[1]).copy_(_inside(local, plan.kept[0]))
        if plan.silent:
            return result
        arrived = self.route.send([_inside(local, box) for _, box in plan.sends], local).wait()
        places = [_inside(result, box) for _, box in plan.receives]
        for place, piece in zip(places, unpacked(arrived, [place.shape for place in places]), strict=True):
            place.copy_(piece)
        return result


def _inside(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@planned(1024)
def redistribution(
    mesh: DeviceMesh,
    before: tuple[Placement, ...],
    target: DeviceMesh,
    after: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> Redistribution:
    """From placements ``before`` on ``mesh`` to ``after`` on ``target``, for a tensor of global ``shape``.

    Made without communication. UnsupportedOperation for a layout with partial sums or other than plain shards, and for
    meshes over different ranks.
    """
    ranks, theirs = ranks_of(mesh), ranks_of(target)
    if ranks != theirs:
        raise UnsupportedOperation(
            f"redistribute: from a mesh over ranks {ranks} to one over ranks {theirs};"
            f" accepted: meshes over the same ranks"
        )
    for layout in (before, after):
        if not all(isinstance(placement, Shard | Replicate) for placement in layout):
            raise UnsupportedOperation(f"redistribute: a tensor laid out as {layout}; accepted: shards and replicas")
    old, new = boxes(mesh, before, shape), boxes(target, after, shape)
    rank = dist.get_rank()
    plan = make_redistribution_plan([old[at] for at in ranks], [new[at] for at in ranks], ranks.index(rank))
    local = tuple(length(interval) for interval in new[rank])
    back = functools.partial(redistribution, target, after, mesh, before, shape)
    filled = [box for box in new.values() if volume(box)]
    return Redistribution(plan, local, whole_group(mesh), len(ranks), back, len(set(filled)) < len(filled))


def redistributed_data(x: DTensor, mesh: DeviceMesh, layout: Sequence[Placement]) -> DTensor:
    """``x`` laid out as ``layout`` on ``mesh``, its partial sums added first. No autograd."""
    x = added(x)
    source = x.device_mesh
    if tuple(x.placements) == tuple(layout) and source == mesh:
        return x
    plan = redistribution(source, tuple(x.placements), mesh, tuple(layout), tuple(x.shape))
    return wrap(plan.fetch(x._local_tensor), mesh, layout, x.shape)


def unsharded(x: DTensor) -> Tensor:
    """The whole tensor on every rank, as a plain one in the memory format of x, which may share x's memory."""
    local = redistributed_data(x, x.device_mesh, replicated(x.device_mesh))._local_tensor
    return local if local is x._local_tensor else local.contiguous(memory_format=memory_format(x))


@LAYOUT_CHANGES
class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> DTensor:
        ctx.source = x.device_mesh, tuple(added_up(x.placements))
        result = redistributed_data(x, mesh, layout)
        if result._local_tensor is x._local_tensor:  # else a change in place of one would change both on some ranks
            result._local_tensor = result._local_tensor.clone()
        return result

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        return redistributed(grad, *ctx.source), None, None


def redistributed(x: DTensor, mesh: DeviceMesh, layout: Sequence[Placement] | None = None) -> DTensor:
    """``x`` in another layout, differentiable: on another mesh over the same ranks, by default in the layout of
    activations, where a tensor that is replicated on all ranks stays so."""
    if layout is None:
        everywhere = all(placement.is_replicate() for placement in x.placements)
        layout = replicated(mesh) if everywhere else placements(mesh, x.dim())
    if tuple(x.placements) == tuple(layout) and x.device_mesh == mesh:
        return x
    return _Redistribute.apply(x, mesh, tuple(layout))


def redistribute(x: DTensor, partition: str | Partition | DeviceMesh) -> DTensor:
    """A tensor under another partition of its ranks; the whole tensor stays the same. Differentiable.

    All ranks of the tensor must call it. It moves only what a rank needs and does not own, and backward moves the
    gradient the other way. What is replicated on all ranks stays replicated.

    Args:
        x: a DTensor.
        partition: text such as `"channel=4"`, or a mesh over the same ranks.

    Raises:
        ValueError: for a tensor that is no DTensor of distconv, and for a partition of another number of ranks.
        UnsupportedOperation: for a mesh over other ranks.
    """
    if not isinstance(x, DTensor) or not is_ours(x.device_mesh):
        raise ValueError(f"redistribute: a {type(x).__name__}; accepted: a DTensor that distconv made, as by shard")
    return redistributed(x, mesh_like(x.device_mesh, partition))


@planned(1024)
def unsharding(
    mesh: DeviceMesh, before: tuple[Placement, ...], after: tuple[Placement, ...], shape: tuple[int, ...]
) -> Exchanges:
    """The exchanges from a layout to one that shards along fewer axes. Made without communication."""
    found = []
    for dim, extent in enumerate(shape):
        axes, kept = dim_axes(mesh, before, dim), dim_axes(mesh, after, dim)
        if axes == kept:
            continue
        wanted = owners(mesh, kept, extent)
        needs = []
        for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
            along = [at for axis, at in zip(axes, place, strict=True) if axis in kept]
            interval = wanted[flat_index(along, map(mesh.size, kept))]
            needs.append(window(interval, extent) if length(interval) else ())
        found.append(exchange(mesh, axes, dim, owners(mesh, axes, extent), tuple(needs)))
    return Exchanges(found)


OPERATIONS = {"sum": SUM, "avg": SUM, "max": MAX, "min": MIN, "product": PRODUCT}
"""The operations by the name of torch's partial placement."""


def added(x: DTensor) -> DTensor:
    """``x`` with every partial placement reduced to a replicated one. Collective where there is one. No autograd."""
    partial = [axis for axis, placement in enumerate(x.placements) if placement.is_partial()]
    if not partial:
        return x
    placements = added_up(x.placements)
    kinds = {placement.reduce_op for placement in x.placements if type(placement) is Partial}
    if len(kinds) != 1 or any(type(x.placements[axis]) is not Partial for axis in partial) or kinds - {*OPERATIONS}:
        return x.redistribute(placements=placements)
    mesh, (kind,) = x.device_mesh, kinds
    axes = tuple(axis for axis in partial if mesh.size(axis) > 1)
    local = x._local_tensor
    result = local.clone(memory_format=torch.contiguous_format)
    if axes:
        result = all_reduced(result, joint_group(mesh, axes), OPERATIONS[kind])
    if kind == "avg":
        result = result / math.prod(mesh.size(axis) for axis in axes)
    return wrap(result.to(local.dtype), mesh, placements, x.shape)
