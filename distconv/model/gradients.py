"""Gradients of parameters: summed over the ranks that hold the same, in a few flat allreduces, begun during backward.

A plain parameter is replicated: its gradient is a sum over all ranks of the mesh. One that is sharded (a DTensor) is
summed over the ranks with the same shard only, so that disjoint groups of ranks reduce their 1/p at once: the segmented
allreduce (Dryden et al., "Channel and filter parallelism for large-scale CNN training", SC 2019, section 3.4).

At the start of a forward pass each bucket of parameters goes through :class:`_Finish`; a parameter's first use makes
its DTensor through :class:`_Use`. Autograd runs later-made nodes first, so in backward `_Use` hands over a gradient as
soon as it is known, the bucket starts its allreduce when its last one arrives, and `_Finish`, made before everything
else, waits last. What reaches the parameters, through any hook, is the whole gradient, or the whole one of the shard.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.agreement.ledger import compare_if_due
from distconv.dtensors import wrap
from distconv.layouts import replicated
from distconv.partition import ownership, whole_group
from distconv.refusal import UnsupportedOperation
from distconv.transfer.group import joint_group
from distconv.transfer.redistribution import moved

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Home:
    """Where a parameter lies: a mesh and its layout there."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same as this one; None for this rank alone. Collective where it must be made."""
        same = tuple(axis for axis, p in enumerate(self.placements) if p.is_replicate() and self.mesh.size(axis) > 1)
        if not same:
            return None
        if len(same) == sum(size > 1 for size in self.mesh.shape):
            return whole_group(self.mesh)
        return joint_group(self.mesh, same)


def home(parameter: Tensor, mesh: DeviceMesh) -> Home:
    """Where a parameter lies. A plain one is replicated on the mesh on which its module runs."""
    if isinstance(parameter, DTensor):
        return Home(parameter.device_mesh, tuple(parameter.placements))
    return Home(mesh, replicated(mesh))


def held(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds, as a plain tensor without autograd."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def buckets(parameters: Mapping[Tensor, Hashable]) -> list[list[Tensor]]:
    """Parameters in the order in which backward reaches them, in lists that share a bucket.

    Those of a list have the same value in ``parameters``, the same device and dtype, and not many more bytes on a rank
    than a bucket holds. The first list is small, so that its allreduce starts early.
    """
    result: list[list[Tensor]] = []
    filling: dict[Hashable, tuple[list[Tensor], int, int]] = {}
    for parameter in reversed(list(parameters)):
        own = held(parameter)
        key = parameters[parameter], own.dtype, own.device
        members, size, limit = filling.get(key, ([], 0, 0))
        if size >= limit:
            members, size, limit = [], 0, BUCKET_BYTES if result else FIRST_BUCKET_BYTES
            result.append(members)
        members.append(parameter)
        filling[key] = members, size + own.numel() * own.element_size(), limit
    return result


class BucketPlan:
    """Where the gradients of some parameters lie in one flat buffer, and who adds it up; kept from pass to pass."""

    def __init__(self, parameters: list[Tensor], homes: list[Home], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.homes, self.group = parameters, homes, group
        self.wholes = [parameter.shape for parameter in parameters]
        self.shapes = [held(parameter).shape for parameter in parameters]
        self.offsets = list(itertools.accumulate((shape.numel() for shape in self.shapes), initial=0))


class Bucket:
    """The gradients of some parameters in one flat buffer, for one forward pass."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan, self.homes = plan, plan.homes
        self._reset()

    def _reset(self) -> None:
        self.flat: Tensor | None = None
        self.arrived: set[int] = set()
        self.work: Any = None

    def slot(self, index: int) -> Tensor:
        """The place of one gradient in the buffer."""
        assert self.flat is not None
        offsets = self.plan.offsets
        return self.flat[offsets[index] : offsets[index + 1]].view(self.plan.shapes[index])

    def gradient(self, index: int) -> Tensor:
        """What the buffer has of one gradient, laid out as its parameter."""
        return self.laid_out(index, self.slot(index))

    def laid_out(self, index: int, slot: Tensor) -> Tensor:
        """What this rank holds of a gradient, laid out as its parameter."""
        mesh, placements = self.homes[index].mesh, self.homes[index].placements
        if all(placement.is_replicate() for placement in placements):
            return slot
        return wrap(slot, mesh, placements, self.plan.wholes[index])

    def put(self, index: int, grad: DTensor) -> Tensor:
        """Puts this rank's share of a gradient into the buffer. The shares of the group's ranks add up to the whole."""
        if self.flat is None:
            self.flat = grad._local_tensor.new_zeros(self.plan.offsets[-1])
        grad = fitting(grad, self.homes[index].placements)
        part = self.part(index, grad, self.slot(index))
        if part is not None:
            part.copy_(grad._local_tensor)
        self.arrived.add(index)
        if len(self.arrived) == len(self.plan.shapes):
            self.start()
        return self.gradient(index)

    def part(self, index: int, grad: DTensor, slot: Tensor) -> Tensor | None:
        """Where in the place of a gradient this rank's share belongs; None where another rank's counts for it."""
        placements = self.homes[index].placements
        mesh, part, counted = self.homes[index].mesh, slot, True
        for axis, (placement, own) in enumerate(zip(grad.placements, placements, strict=True)):
            if own.is_shard():
                continue
            coordinate = mesh.get_local_rank(axis)
            if isinstance(placement, Shard):
                start, stop = ownership(part.shape[placement.dim], mesh.size(axis))[coordinate]
                part = part.narrow(placement.dim, start, stop - start)
            elif placement.is_replicate():
                counted = counted and coordinate == 0
            elif not placement.is_partial("sum"):
                raise UnsupportedOperation(f"the gradient of a parameter is laid out as {grad.placements}")
        return part if counted else None

    def start(self) -> None:
        """Begin the sum over the group, after a comparison of what the ranks must agree on, if one is due."""
        compare_if_due()
        if self.plan.group is not None:
            self.work = dist.all_reduce(self.flat, group=self.plan.group, async_op=True)

    def finish(self) -> dict[int, Tensor]:
        """Waits for the sum. Returns {index: whole gradient} of the gradients that arrived."""
        if self.flat is None:
            return {}
        if len(self.arrived) < len(self.plan.shapes):
            self.start()
        if self.work is not None:
            self.work.wait()
        grads = {index: self.gradient(index) for index in self.arrived}
        self._reset()
        return grads


def fitting(grad: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """The gradient, sharded as its parameter is. Rules usually leave it so; where one does not, it is redistributed."""
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    fits = all(
        found == own if own.is_shard() else not (isinstance(found, Shard) and found.dim in dims)
        for found, own in zip(grad.placements, placements, strict=True)
    )
    return grad if fits else moved(grad, grad.device_mesh, placements)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(_alias(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = ctx.bucket.finish()
        return (None, *(whole.get(index) for index in range(len(grads))))


def _alias(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.view_as(parameter)
    return wrap(parameter._local_tensor, parameter.device_mesh, parameter.placements, parameter.shape)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, bucket: Bucket, index: int) -> DTensor:
        ctx.bucket, ctx.index = bucket, index
        return distributed(parameter, bucket.homes[index].mesh)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None]:
        return ctx.bucket.put(ctx.index, grad), None, None


def distributed(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor that shares the memory of a sharded tensor, or of a plain one, equal on all ranks; no autograd."""
    placed = home(tensor, mesh)
    return wrap(held(tensor), placed.mesh, placed.placements, tensor.shape)


def used(bucket: Bucket, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The DTensors of all parameters of a bucket, for one forward pass."""
    for index, source in enumerate(_Finish.apply(bucket, *parameters)):
        yield _Use.apply(source, bucket, index)


_plans: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], list[BucketPlan]]] = weakref.WeakKeyDictionary()
"""For each module called outermost: what its buckets were made for, and the plans of the buckets."""


def bucket_plans(model: nn.Module, parameters: Mapping[Tensor, DeviceMesh]) -> list[BucketPlan]:
    """The plans of the buckets of a model's parameters, each on its mesh. Made anew only where something has changed:
    the parameters, which of them are trained, or where, how large and of which dtype they are.
    """
    # A plan holds its parameters, so an id that occurs again is that of the same one.
    now: list[Any] = [
        (id(p), mesh, p.dtype, p.device, p._spec if isinstance(p, DTensor) else p.shape)
        for p, mesh in parameters.items()
        if p.requires_grad
    ]
    before, plans = _plans.get(model, (None, []))
    if before != now:
        homes = {p: home(p, mesh) for p, mesh in parameters.items() if p.requires_grad}
        groups = {place: place.group() for place in dict.fromkeys(homes.values())}
        plans = [
            BucketPlan(members, [homes[member] for member in members], groups[homes[members[0]]])
            for members in buckets({parameter: groups[place] for parameter, place in homes.items()})
        ]
        _plans[model] = now, plans
    return plans


def uses(model: nn.Module, parameters: Mapping[Tensor, DeviceMesh]) -> Callable[[Tensor], Tensor]:
    """For one forward pass: a function from each parameter to its DTensor on its mesh, made at first use; other tensors
    pass as they are.
    """
    made: dict[Tensor, Tensor] = {}
    sources: dict[Tensor, tuple[Tensor, Bucket, int]] = {}
    if torch.is_grad_enabled():
        for plan in bucket_plans(model, parameters):
            bucket, members = Bucket(plan), plan.parameters
            for index, (parameter, source) in enumerate(zip(members, _Finish.apply(bucket, *members), strict=True)):
                sources[parameter] = (source, bucket, index)

    def use(parameter: Tensor) -> Tensor:
        if parameter in made:
            return made[parameter]
        if parameter in sources:
            made[parameter] = _Use.apply(*sources[parameter])
        elif parameter in parameters:
            made[parameter] = distributed(parameter, parameters[parameter])
        else:
            return parameter
        return made[parameter]

    return use
