"""Gradients of parameters: summed over the ranks that have the same one, in a few flat allreduces during backward.

A plain parameter is replicated: its gradient is a sum over all ranks of the mesh. The gradient of a sharded one (a
DTensor) is summed only over the ranks with the same shard, so that disjoint groups of ranks reduce their 1/p at once:
the segmented allreduce (Dryden et al., "Channel and filter parallelism for large-scale CNN training", SC 2019,
section 3.4).

At the start of a forward pass each bucket of parameters goes through :class:`_Finish`. The first use of a parameter
makes a tensor of this rank that all its uses share (`distconv.model.uses`). Autograd runs nodes that were made later
first. So in backward a hook on that tensor delivers this rank's share of a gradient as soon as it is complete, the
bucket starts its allreduce when its last share has arrived, and `_Finish`, which was made first, waits last. Every hook
of a parameter sees the summed gradient, or that of the shard.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.agreement.ledger import compare_if_due
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.fully_sharded import gradient, is_fully_sharded
from distconv.model.homes import buckets, group_of, home
from distconv.model.parameter_hooks import not_without_gradient
from distconv.rules.operands.own_parts import Added, apply, wrapped
from distconv.tensors import hooks
from distconv.tensors.layouts import local_shape
from distconv.transfer import group_calls
from distconv.transfer.stream import Stream

_unflatten = getattr(torch._C._nn, "unflatten_dense_tensors", torch.ops.aten.unflatten_dense_tensors)
"""The private function takes half as long; the operator is for a torch without it."""


class BucketPlan:
    """The slots of some parameters' gradients in one flat buffer, and the ranks that sum it. The same in all passes."""

    def __init__(self, parameters: list[Tensor], places: list[ShapedLayout], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.places, self.group = parameters, places, group
        self.shapes = [torch.Size(local_shape(place.mesh, place.placements, place.shape)) for place in places]
        self.plain = [all(placement.is_replicate() for placement in place.placements) for place in places]
        """Whether a parameter is replicated over its mesh."""
        kinds = [(p.dtype, p.device) for p in parameters]
        zeros = {kind: torch.zeros((), dtype=kind[0], device=kind[1]) for kind in set(kinds)}
        self.stand_ins = [zeros[kind].expand(shape) for kind, shape in zip(kinds, self.shapes, strict=True)]
        """In the shapes of this rank's shares, without memory."""
        self.is_full = is_fully_sharded(parameters[0])
        """Whether its parameters are sharded along all axes; the group is then none."""


class Bucket:
    """The gradients of some parameters in one flat buffer, for one forward pass."""

    is_apart = False  # Whether this rank's shares do not go on to the parameters, by way of autograd.
    hands_on = False  # Whether, where that is so, they do for the time being.
    takes: Collection[int] | None = None
    """The numbers of the parameters whose shares count for the time being, where they do not go on; None: all."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self._more: dict[int, int] = {}  # By index: how many shares of a gradient follow the first.
        self._reset()

    def _reset(self) -> None:
        self.shares: dict[int, Tensor] = {}
        self._streams: dict[int, Stream] = {}
        self._missing = dict(self._more)
        self._started = False
        self.flat: Tensor | None = None
        self.arrived: set[int] = set()
        self.work: Any = None

    def expect_one_more(self, index: int) -> None:
        """Says that a further tensor represents a parameter, whose gradient will arrive as one more share."""
        self._more[index] = self._missing[index] = self._more.get(index, 0) + 1

    def alias(self, index: int, parameter: Tensor) -> Tensor:
        """The tensor that represents a parameter in autograd's graph: this rank's part of it."""
        return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()

    def take(self, index: int, share: Any) -> Any:
        """Takes this rank's share of a gradient. Returns a stand-in, which autograd passes on to `_Finish`."""
        if share is None or torch.is_grad_enabled():  # with create_graph, `_Finish` gets the share itself
            return share  # None for a weight that a second derivative does not depend on
        if index in self.arrived:
            self._missing[index] -= 1
            share = self._here(index) + share
        self.shares[index] = share
        if share.is_cuda:
            self._streams[index] = Stream(share)
        plan, arrived = self.plan, self.arrived
        arrived.add(index)
        if len(arrived) == len(plan.shapes) and not any(self._missing.values()):
            self.start()
        return plan.stand_ins[index]

    def _here(self, index: int) -> Tensor:
        """This rank's share of a gradient, which the current stream may use."""
        share, stream = self.shares[index], self._streams.get(index)
        return share if stream is None else stream.hand_over(share)

    def sources(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors that represent its parameters in one forward pass, with this bucket's sums as gradients."""
        result: tuple[Tensor, ...] = apply(_Finish, self, *parameters)
        return result

    def start(self) -> None:
        """Begins the sum over the group, after a comparison of what the ranks must agree on, if one is due."""
        self._started = True
        compare_if_due(self.plan.places[0].mesh)
        if self.plan.group is not None:
            own = {index: self._here(index) for index in self.shares} if self._streams else self.shares
            parts = [own.get(index, stand_in) for index, stand_in in enumerate(self.plan.stand_ins)]
            self.flat = torch.ops.aten.flatten_dense_tensors(parts)
            self._stream = Stream(self.flat)
            self.shares.clear()
            group_calls.count_sum(self.flat, self.plan.group)
            self.work = group_calls.all_reduce(self.flat, group=self.plan.group)

    def differentiable(self, shares: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The summed gradients of this rank's shares, by operators that can be differentiated again; None for None."""
        found: list[Tensor | None] = []
        for index, (place, share) in enumerate(zip(self.plan.places, shares, strict=True)):
            axes = tuple(axis for axis, placement in enumerate(place.placements) if placement.is_replicate())
            total = Added.apply(self.plan.stand_ins[index] if share is None else share, place.mesh, axes)
            if not self.plan.plain[index]:
                total = wrapped(total, place.mesh, place.placements, place.shape)
            found.append(None if share is None else total)
        return found

    def finish(self) -> dict[int, Tensor]:
        """Waits for the sum. Returns {index: summed gradient} of the gradients that arrived."""
        if not self.arrived:
            return {}
        if not self._started:
            self.start()
        sums, plain, parameters = self._summed(), self.plan.plain, self.plan.parameters
        grads = {
            index: sums[index] if plain[index] else gradient(sums[index], parameters[index]) for index in self.arrived
        }
        self._reset()
        return grads

    def _summed(self) -> Any:
        """By index: the sums, once they are there."""
        if self.flat is None:
            return {index: self._here(index) for index in self.shares}
        group_calls.wait(self.work)
        return _unflatten(self._stream.hand_over(self.flat), self.plan.stand_ins)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple([bucket.alias(index, parameter) for index, parameter in enumerate(parameters)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            found = ctx.bucket.differentiable(grads)
        else:
            found = [*map(ctx.bucket.finish().get, range(len(grads)))]
        not_without_gradient(x for x, grad in zip(ctx.bucket.plan.parameters, found, strict=True) if grad is None)
        return None, *found


def bucket_of(use: Any) -> tuple[Bucket, int] | None:
    """The bucket that gets the gradient of a use, a node of autograd's graph, and the number of the parameter there."""
    index = 0
    while not isinstance(getattr(use, "bucket", None), Bucket):
        if use is None or not use.next_functions:
            return None
        use, index = use.next_functions[0]
    return use.bucket, index


_FACTS: Any = operator.attrgetter("requires_grad", "dtype", "device", "shape")

_plans: weakref.WeakKeyDictionary[
    nn.Module, dict[DeviceMesh | None, tuple[list[Any], Sequence[Tensor], list[BucketPlan]]]
] = weakref.WeakKeyDictionary()
"""For each module called outermost, by the first mesh: the facts that its buckets depend on, and their plans."""
hooks.after_jobs.append(lambda _: _plans.clear())


def bucket_plans(model: nn.Module, parameters: Sequence[Tensor], meshes: Sequence[DeviceMesh]) -> list[BucketPlan]:
    """The plans of the buckets of a model's parameters, each on its mesh. Made anew only where something has changed:
    the parameters, which of them are trained, or where, how large and of which dtype they are."""
    # A model has hundreds: these functions loop outside of Python.
    now = [[*map(id, parameters)], [*map(_FACTS, parameters)], meshes]
    if {*map(type, parameters)} != {nn.Parameter}:
        now.append([x._spec if isinstance(x, DTensor) else None for x in parameters])
    known, first = _plans.setdefault(model, {}), next(iter(meshes), None)
    before, _, plans = known.get(first, (None, (), []))
    if before != now:
        with torch._C.DisableTorchFunctionSubclass():  # the parameters are in use
            plans = new_bucket_plans({p: mesh for p, mesh in zip(parameters, meshes, strict=True) if p.requires_grad})
        known[first] = now, parameters, plans  # keeps the parameters alive, so that their ids stay theirs
    return plans


def is_of_a_model(x: Tensor) -> bool:
    """Whether a tensor is a parameter of a model that has been called and recorded by autograd."""
    if not isinstance(x, nn.Parameter):
        return False
    return any(x is p for known in _plans.values() for _, parameters, _ in known.values() for p in parameters)


def new_bucket_plans(parameters: Mapping[Tensor, DeviceMesh]) -> list[BucketPlan]:
    """The plans of the buckets of these parameters, each on its mesh. Collective where groups have to be made."""
    homes = {parameter: home(parameter, mesh) for parameter, mesh in parameters.items()}
    full = [*filter(is_fully_sharded, parameters)]
    plans = [
        BucketPlan(members, [homes[member] for member in members], None)
        for mesh in dict.fromkeys(homes[member].mesh for member in full)
        if (members := [member for member in full if homes[member].mesh == mesh])
    ]
    homes = {parameter: place for parameter, place in homes.items() if not is_fully_sharded(parameter)}
    groups = {place: group_of(place) for place in dict.fromkeys(homes.values())}
    return plans + [
        BucketPlan(members, [homes[member] for member in members], groups[homes[members[0]]])
        for members in buckets({p: (groups[place], is_of_a_part(p, place.mesh)) for p, place in homes.items()})
    ]


def is_of_a_part(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether a parameter is a tensor that one of several parts in this process has, not one that they share."""
    return isinstance(parameter, DTensor) and mesh in hooks.bucket_classes


def new_bucket(plan: BucketPlan) -> Bucket:
    """A bucket of a plan whose parameters are not fully sharded."""
    mesh = plan.places[0].mesh
    if is_of_a_part(plan.parameters[0], mesh):
        return Bucket(plan)
    made: Bucket = hooks.bucket_classes.get(mesh, Bucket)(plan)
    return made
