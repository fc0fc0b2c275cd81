"""Running statistics of a compiled model: updated where its graph ends, so that one exchange serves all norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from distconv.rules.normalization.running import begin_graph, end_graph


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
