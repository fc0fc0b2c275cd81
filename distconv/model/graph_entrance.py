"""The parameters of a compiled model at the entrance of its graph: distributed, and in buckets for their gradients."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.direct.shares import as_sharded
from distconv.dtensors import wrap
from distconv.model.gradients import Bucket, BucketPlan, buckets, distributed, home, used
from distconv.transfer.all_reduce import AllReduce


def enter_parameters(graph: fx.GraphModule, inputs: Sequence[Any], meshes: Mapping[Tensor, DeviceMesh]) -> None:
    """Puts what parameters go through at the beginning of a graph that reads them plain.

    Args:
        graph: as torch.compile has found it; it is changed.
        inputs: of the graph, in order.
        meshes: {parameter: where it lies}.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    found = [
        (node, value)
        for node, value in zip(nodes, inputs, strict=True)
        if isinstance(value, Tensor) and value in meshes
    ]
    if not found:
        return
    enter = _Enter([value for _, value in found], meshes)
    with graph.graph.inserting_after(nodes[-1]):
        entering = graph.graph.call_function(enter, tuple(node for node, _ in found))
    last = entering
    for index, (node, _) in enumerate(found):
        with graph.graph.inserting_after(last):
            last = graph.graph.call_function(operator.getitem, (entering, index))
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not entering)
    graph.recompile()


class _Enter:
    """What the parameters of a graph go through before anything reads them."""

    __name__ = "enter_parameters"

    def __init__(self, parameters: Sequence[Tensor], meshes: Mapping[Tensor, DeviceMesh]) -> None:
        places = {parameter: place for place, parameter in enumerate(parameters)}
        self._meshes = [meshes[parameter] for parameter in parameters]
        trained = [p for p in parameters if p.requires_grad and torch.is_grad_enabled()]
        homes = {parameter: home(parameter, meshes[parameter]) for parameter in trained}
        groups = {place: place.group() for place in dict.fromkeys(homes.values())}
        self._buckets = []
        for members in buckets({parameter: groups[place] for parameter, place in homes.items()}):
            plan = BucketPlan(members, [homes[member] for member in members], groups[homes[members[0]]])
            self._buckets.append((plan, [places[member] for member in members]))

    def __call__(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        result: list[Tensor] = [distributed(p, mesh) for p, mesh in zip(parameters, self._meshes, strict=True)]
        for plan, places in self._buckets:
            members = used(_TracedBucket(plan), [parameters[place] for place in places])
            for place, member in zip(places, members, strict=True):
                result[place] = member
        return tuple(result)


class _TracedBucket(Bucket):
    """A bucket within a graph: its gradients are put together once all are there."""

    def _reset(self) -> None:
        super()._reset()
        self._shares: dict[int, Tensor] = {}

    def alias(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter.view_as(parameter)
        return wrap(parameter._local_tensor, parameter.device_mesh, parameter.placements, parameter.shape)

    def put(self, index: int, grad: DTensor) -> Tensor:
        grad = as_sharded(grad, self.homes[index].placements)
        local = grad._local_tensor
        share = local.new_zeros(self.plan.shapes[index])
        part = self.part(index, grad, share)
        if part is not None and part.shape == share.shape:
            share = local
        elif part is not None:
            part.copy_(local)
        self._shares[index] = share
        self.arrived.add(index)
        if len(self.arrived) == len(self.plan.shapes):
            self.start()
        return self.laid_out(index, share)

    def start(self) -> None:
        like = next(iter(self._shares.values()))
        shares = [self._shares.get(index) for index in range(len(self.plan.shapes))]
        self.flat = torch.cat(
            [
                like.new_zeros(shape.numel()) if share is None else share.reshape(-1)
                for share, shape in zip(shares, self.plan.shapes, strict=True)
            ]
        )
        if self.plan.group is not None:
            self.work = AllReduce(self.flat, self.plan.group)

    def finish(self) -> dict[int, Tensor]:
        if not self.arrived:
            return {}
        if self.flat is None:
            self.start()
        if self.work is not None:
            self.flat = self.work.wait()
        grads = {index: self.gradient(index) for index in self.arrived}
        self._reset()
        return grads
