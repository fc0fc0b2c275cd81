"""Collectives whose results nothing reads: what is put into a graph so that they stay in it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from distconv.transfer.unread import BACKWARD, FORWARD, read_collectives

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


def joint(read: tuple[bool, ...], tag: str = BACKWARD) -> fx.Graph:
    """A gradient, and one collective after another, each of which a result of the graph reads or not."""
    graph = fx.Graph()
    tangent = graph.placeholder("tangents_1")
    gradient = graph.call_function(aten.neg.default, (tangent,))
    results, meta = [gradient], {"val": torch.empty(3), "partitioner_tag": "is_backward"}
    tangent.meta, gradient.meta = meta, meta | {"eager_input_vals": ((torch.empty(3),), {})}
    for is_read in read:
        message = graph.call_function(aten.full.default, ([3], 0.0))
        started = graph.call_function(collectives.all_reduce.default, (message, "sum", "0"))
        arrived = graph.call_function(collectives.wait_tensor.default, (started,))
        message.meta = meta | {"eager_input_vals": (([3], 0.0), {})}
        started.meta = arrived.meta = meta | {"partitioner_tag": tag}
        results += [arrived] if is_read else []
    graph.output(tuple(results))
    return graph


def names(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes]


@pytest.mark.parametrize("read", [(False,), (False, True), (True, False), (False, False, True), (False, True, False)])
def test_each_collective_of_backward_is_needed_in_its_place(read: tuple[bool, ...]) -> None:
    graph = joint(read)
    before = [name for name in names(graph) if "c10d" in name]
    read_collectives(graph)
    graph.lint()
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "call_function")
    added = graph.find_nodes(op="call_function", target=torch.ops.distconv.after.default)
    assert added and not any("eager_input_vals" in node.meta for node in added)  # those of another function
    assert [name for name in names(graph) if "c10d" in name] == before


def test_the_first_collective_of_backward_is_not_moved() -> None:
    graph = joint((True, True))
    (gradient,) = graph.find_nodes(op="call_function", target=aten.neg.default)
    graph.output_node().prepend(gradient)
    read_collectives(graph)
    graph.lint()
    (given,) = graph.find_nodes(op="placeholder")
    places = {node: place for place, node in enumerate(graph.nodes)}
    first, *_ = graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
    assert min(places[user] for user in given.users) == places[first.args[0]] == places[first] - 1


@pytest.mark.parametrize("read, tag", [((True, True), BACKWARD), ((False, True), FORWARD), ((False,), "is_backward")])
def test_a_graph_stays_as_it_is_otherwise(read: tuple[bool, ...], tag: str) -> None:
    graph = joint(read, tag)
    before = names(graph)
    read_collectives(graph)
    assert names(graph) == before
