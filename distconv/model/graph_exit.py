"""The end of a compiled model's graph: its outputs, and the running statistics of all its norms, in one exchange.

If backward starts from some of the outputs on DTensors, the others get zeros as DTensors. Autograd itself makes plain
zeros for an output that no loss depends on, which the graph's backward does not take. An input that the graph changes
in place counts as an output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate

from distconv.rules.normalization.running import begin_graph, end_graph
from distconv.rules.operands.own_parts import apply
from distconv.tensors.dtensors import wrap


class _ZerosForMissing(torch.autograd.Function):
    """The identity on a graph's outputs. Its backward makes zeros where an output has no gradient."""

    @staticmethod
    def forward(ctx: Any, changed: int, *outputs: DTensor) -> tuple[Tensor, ...]:
        """``changed``: the number of inputs that the graph has changed; they are the last ones of the outputs."""
        ctx.set_materialize_grads(False)
        ctx.like = [(x._spec, x._local_tensor.shape, x.dtype, x.device) for x in outputs]
        made: Any = DTensor  # with the same local tensors, so that their versions count later changes
        count = len(outputs) - changed
        ctx.mark_dirty(*outputs[count:])
        return *[made(x._local_tensor, x._spec, requires_grad=False) for x in outputs[:count]], *outputs[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *[_zeros(*like) if x is None else x for x, like in zip(grads, ctx.like, strict=True)]


def _zeros(spec: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> DTensor:
    placements = [Replicate() if p.is_partial() else p for p in spec.placements]  # as tangents are
    return wrap(torch.zeros(shape, dtype=dtype, device=device), spec.mesh, placements, spec.shape)


def differentiable_apart(graph: Callable[..., Any], *args: Any) -> Any:
    """The outputs of a compiled graph, of which backward may start from some alone."""
    inputs = [(x, x.grad_fn) for x in args if type(x) is DTensor]
    outputs = graph(*args)
    if not (torch.is_grad_enabled() and isinstance(outputs, tuple | list)):
        return outputs
    nodes = [(x, x.grad_fn) for x, before in inputs if x.grad_fn is not before]
    changed = [x for x, node in nodes if node is not None and "CopyBackwards" in node.name()]
    return _with_zeros_for_missing(outputs, changed)


def _with_zeros_for_missing(outputs: Sequence[Any], changed: Sequence[DTensor]) -> list[Any]:
    """Applies `_ZerosForMissing` to the outputs of each graph that has several, and to the inputs that it changed."""
    found = [*outputs, *changed]
    of_graphs: dict[Any, list[int]] = {}
    for at, x in enumerate(found):
        if at >= len(outputs):  # torch copies an output of the graph into it
            of_graphs.setdefault(x.grad_fn.next_functions[1][0], []).append(at)
        elif type(x) is DTensor and x.grad_fn is not None and not any(x is other for other in changed):
            of_graphs.setdefault(x.grad_fn, []).append(at)  # (an output that is a view has a node of its own)
    for places in of_graphs.values():
        if len(places) > 1:
            inputs = sum(at >= len(outputs) for at in places)
            for at, x in zip(places, apply(_ZerosForMissing, inputs, *(found[at] for at in places)), strict=True):
                found[at] = x
    return found[: len(outputs)]


def move_statistics_last(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Marks a graph's beginning, for the buffers that one function alone reads, and its end, where they are moved.

    Args:
        graph: as torch.compile has found it; it is changed.
        inputs: of the graph, in order.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    output = graph.graph.output_node()
    results = [node for node in output.all_input_nodes]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    memory = Counter(value.untyped_storage()._cdata for value in tensors if type(value) is Tensor)
    read_once = [
        node
        for node, value in zip(nodes, inputs, strict=True)
        if type(value) is Tensor
        and not isinstance(value, nn.Parameter)
        and not value.requires_grad
        and value.dim() == 1
        and value.is_floating_point()
        and memory[value.untyped_storage()._cdata] == 1
        and len(node.users) == 1
        and node not in results
    ]
    if not read_once or not results:
        return
    with graph.graph.inserting_after(nodes[-1]):
        begun = graph.graph.call_function(_begun, tuple(read_once))
    for index, node in enumerate(read_once):
        with graph.graph.inserting_after(begun):
            same = graph.graph.call_function(getitem, (begun, index))
        node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not begun)
    with graph.graph.inserting_before(output):
        ended = graph.graph.call_function(_ended, tuple(results))
        for index, node in enumerate(results):
            output.replace_input_with(node, graph.graph.call_function(getitem, (ended, index)))
    graph.recompile()


def _begun(*buffers: Tensor) -> tuple[Tensor, ...]:
    begin_graph(buffers)
    return buffers


def _ended(*results: Any) -> tuple[Any, ...]:
    end_graph()
    return results
