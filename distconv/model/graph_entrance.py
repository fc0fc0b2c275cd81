"""The beginning of a compiled model's graph: parameters become DTensors, and buckets for their gradients are made.

Parameters that are sharded along all axes are gathered where the graph first uses them, and again in backward
(`distconv.transfer.compilers`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.model.direct.shares import share_of
from distconv.model.fully_sharded import ShardDivision, division, format_of, gradient, is_fully_sharded
from distconv.model.gradients import Bucket, new_bucket_plans
from distconv.model.homes import home, local_part
from distconv.tensors.autograd_nodes import PARAMETER_USES
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.transfer.collectives import AllReduce
from distconv.transfer.unread import GATHERS


def enter_parameters(graph: fx.GraphModule, inputs: Sequence[Any], meshes: Mapping[Tensor, DeviceMesh]) -> None:
    """Lets the parameters of a traced graph, which are plain, pass through nodes that make DTensors of them.

    A node at the beginning makes the buckets: in backward it comes last, and waits for the sums of gradients. A node
    before the first use of each parameter hands its gradient to the bucket: in backward it comes as soon as the
    gradient is complete. If autograd records nothing at the first use (torch.no_grad), that node is put before the
    graph switches autograd off.

    Args:
        graph: as torch.compile has traced it; it is changed.
        inputs: of the graph, in order.
        meshes: {parameter: its mesh}.
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
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    recorded = _recorded(graph.graph)
    gathered: list[fx.Node] = []
    for index, (node, _) in enumerate(found):
        users = [user for user in node.users if user is not entering]
        if users:
            with graph.graph.inserting_before(recorded[min(users, key=order.__getitem__)]):
                source = graph.graph.call_function(operator.getitem, (entering, index))
                own = graph.graph.call_function(_Use(enter, index), (source,))
            if enter.gathers[index] is not None:
                own.meta["custom"] = {GATHERS: index}
                gathered.append(own)
            node.replace_all_uses_with(own, delete_user_cb=lambda user: user is not entering)
    if gathered:
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.graph.call_function(_refuse_changes, tuple(gathered))
    graph.recompile()


def _recorded(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """{node: itself; or, if autograd records nothing there, the node that has switched autograd off}."""
    found: dict[fx.Node, fx.Node] = {}
    off: list[fx.Node] = []
    for node in graph.nodes:
        found[node] = off[0] if off else node
        if node.target is torch._C._set_grad_enabled:
            off = [] if node.args[0] else [*off, node]
        elif node.target is _enter_inference_mode and node.args[0]:
            off = [*off, node]
        elif node.target is _exit_inference_mode:
            off = [each for each in off if each is not node.args[0]]
    return found


class _Enter:
    """The function that the parameters of a graph go through before anything reads them."""

    __name__ = "enter_parameters"

    def __init__(self, parameters: Sequence[Tensor], meshes: Mapping[Tensor, DeviceMesh]) -> None:
        places = {parameter: place for place, parameter in enumerate(parameters)}
        self._meshes = [meshes[parameter] for parameter in parameters]
        self.gathers = [_Gather(x, meshes[x]) if is_fully_sharded(x) else None for x in parameters]
        trained = [p for p in parameters if p.requires_grad and torch.is_grad_enabled()]
        plans = new_bucket_plans({parameter: meshes[parameter] for parameter in trained})
        self._buckets = [(plan, [places[member] for member in plan.parameters]) for plan in plans]
        self.handed_over: dict[int, tuple[_TracedBucket, int]] = {}
        """By the place of a trained parameter: its bucket in the pass that is being traced, and its number there."""

    def __call__(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        result: list[Tensor] = [*map(_as_stored, parameters, self._meshes)]
        for plan, places in self._buckets:
            bucket = (_TracedFullBucket if plan.is_full else _TracedBucket)(plan)
            finished = bucket.sources([parameters[place] for place in places])
            for index, (place, source) in enumerate(zip(places, finished, strict=True)):
                result[place], self.handed_over[place] = source, (bucket, index)
        return tuple(result)


class _Gather:
    """Gathers a parameter that is sharded along all axes, for the functions that use it."""

    def __init__(self, parameter: Tensor, mesh: DeviceMesh) -> None:
        self._home = home(parameter, mesh)
        self._division: ShardDivision = division(parameter)  # type: ignore[arg-type]
        self._form = format_of(parameter)  # type: ignore[arg-type]

    def __call__(self, source: DTensor) -> DTensor:
        whole = self._division.gathered(source._local_tensor, self._form)
        return wrap(whole, self._home.mesh, self._home.placements, source.shape)


class _Use:
    """The first use of a parameter of a graph."""

    __name__ = "use_parameter"

    def __init__(self, enter: _Enter, place: int) -> None:
        self._enter, self._place = enter, place

    def __call__(self, source: DTensor) -> Tensor:
        found, gather = self._enter.handed_over.get(self._place), self._enter.gathers[self._place]
        if found is not None:
            return _HandOver.apply(source, gather or _as_stored, *found)
        return source if gather is None else gather(source)


def _as_stored(x: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A parameter as a DTensor outside of autograd, with the same memory; ``mesh``: that of a plain one."""
    if isinstance(x, DTensor):
        return wrap(x._local_tensor, x.device_mesh, x.placements, x.shape)
    assert mesh is not None, "that of its module"
    return wrap(local_part(x), mesh, replicated(mesh), x.shape)


@PARAMETER_USES
class _HandOver(torch.autograd.Function):
    """Passes a parameter's gradient to its bucket, early in backward: autograd runs later nodes first."""

    @staticmethod
    def forward(ctx: Any, source: DTensor, made: Callable[[DTensor], DTensor], bucket: Any, index: int) -> DTensor:
        ctx.bucket, ctx.index = bucket, index
        return made(source)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        return ctx.bucket.put(ctx.index, grad), None, None, None


def _refuse_changes(*gathered: DTensor) -> None:
    """RuntimeError where the graph writes to a gathered parameter: the parameter itself would not change."""
    for x in gathered:
        own = x._local_tensor
        if isinstance(own, FunctionalTensor) and torch._functionalize_has_data_mutation(own.elem):  # type: ignore[attr-defined]
            raise RuntimeError(
                f"it changes a parameter {tuple(x.shape)} that is sharded along all axes in forward; accepted: without"
                " --shard-parameters"
            )


class _TracedBucket(Bucket):
    """A bucket within a graph: its gradients are concatenated once all are there."""

    def alias(self, index: int, parameter: Tensor) -> Tensor:
        return _as_stored(parameter, self.plan.places[index].mesh)

    def put(self, index: int, grad: DTensor) -> DTensor:
        """Takes this rank's share of a gradient. Returns a DTensor in its place, for autograd to pass on."""
        place = self.plan.places[index]
        share = self.shares[index] = share_of(grad, place)
        self.arrived.add(index)
        if len(self.arrived) == len(self.plan.shapes):
            self.start()
        return wrap(share, place.mesh, place.placements, place.shape)

    def start(self) -> None:
        self._started = True
        like = next(iter(self.shares.values()))
        self.flat = torch.cat(
            [
                _shaped(self.shares[index], (shape.numel(),)) if index in self.shares else like.new_zeros(shape.numel())
                for index, shape in enumerate(self.plan.shapes)
            ]
        )
        if self.plan.group is not None:
            self.work = AllReduce(self.flat, self.plan.group)

    def _summed(self) -> list[Tensor]:
        assert self.flat is not None, "it has been started"
        flat, shapes = self.flat if self.work is None else self.work.wait(), self.plan.shapes
        return [*map(_shaped, flat.split([shape.numel() for shape in shapes]), shapes)]


class _TracedFullBucket(_TracedBucket):
    """The gradients of parameters that are sharded along all axes: each is added up as soon as it is there."""

    def put(self, index: int, grad: DTensor) -> DTensor:
        parameter: Any = self.plan.parameters[index]
        part = self.shares[index] = division(parameter).summed(share_of(grad, self.plan.places[index]))
        return wrap(part, parameter.device_mesh, parameter.placements, parameter.shape)

    def finish(self) -> dict[int, Tensor]:
        grads: dict[int, Tensor] = {
            index: gradient(part, self.plan.parameters[index]) for index, part in self.shares.items()
        }
        self._reset()
        return grads


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in a shape. No operator enters the graph where it has that shape already."""
    return x if x.shape == tuple(shape) else x.reshape(shape)
