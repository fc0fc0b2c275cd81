"""Keeps collectives in a rank's graph whose results the rank does not read, so that all ranks do the same in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_library = torch.library.Library("distconv", "FRAGMENT")
_library.define("after(Tensor x, Tensor[] others) -> Tensor")

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"
"""Tags by which torch's partitioner knows in which graph a collective of the joint graph stays."""

GATHERS = "distconv_gathers"
"""A key of a node's ``meta["custom"]``: the number of the parameter that the node was traced to gather."""


@torch.library.impl(_library, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, others: list[Tensor]) -> Tensor:
    """x; to a compiler, the result is also computed from the others."""
    return x.clone()


def gathered_parameter(node: fx.Node) -> int | None:
    """The number of the parameter that a node was traced to gather; None for others."""
    return (node.meta.get("custom") or {}).get(GATHERS)


def pinned_graph(node: fx.Node) -> str | None:
    """``FORWARD`` or ``BACKWARD`` for a collective that stays there, or for the wait for it; None for others."""
    is_ours = getattr(node.target, "namespace", None) == "_c10d_functional"
    tag = node.meta.get("partitioner_tag")
    return tag if is_ours and tag in (FORWARD, BACKWARD) else None


def read_collectives(graph: fx.Graph) -> None:
    """Lets each collective of backward be read by the next one, or by a gradient, where nothing else reads it.

    In the graph of backward, a compiler keeps the operators from which its results are computed. A rank with an empty
    shard computes nothing from its messages: it would leave the collective out, and the others would wait for it.

    The first collective reads a gradient that backward is given, if it would come before all nodes that do: the
    compiler moves such nodes to where they are needed, so that a rank that sends nothing would do it later.

    The cost is a copy of each tensor that gets a further reader, in such graphs alone.

    ``graph``: forward and backward in one, before it is partitioned; it is changed.
    """
    output = next(iter(graph.find_nodes(op="output")))
    needed, others = _needed(output), _first_reads(graph)
    for node in [node for node in graph.nodes if pinned_graph(node) == BACKWARD]:
        if node.target is not torch.ops._c10d_functional.wait_tensor.default:
            if others:
                _read(graph, node, node.args[0], others)
            others = []
        elif node not in needed:
            others.append(node)
    gradients = [x for x in output.all_input_nodes if x.meta.get("partitioner_tag") in ("is_backward", BACKWARD)]
    if others and gradients:
        _read(graph, output, min(gradients, key=lambda x: int(x.meta["val"].numel())), others)


def _first_reads(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the first collective of backward should read: a gradient that backward is given, if the collective
    comes before every use of one. None where none is used at all: the compiler then leaves the order as it is."""
    given = [node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)]
    is_early = False
    for node in graph.nodes:
        if any(x in given for x in node.all_input_nodes):
            return given[:1] if is_early else []
        is_early = is_early or pinned_graph(node) == BACKWARD
    return []


def _needed(output: fx.Node) -> set[fx.Node]:
    """The nodes that the output is computed from."""
    found: set[fx.Node] = set()
    left = [output]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _read(graph: fx.Graph, reader: fx.Node, x: Any, others: list[fx.Node]) -> None:
    """Lets a node that reads x read the others, too, as far as the compiler can see."""
    with graph.inserting_before(reader):
        after = graph.call_function(torch.ops.distconv.after.default, (x, others))
    after.meta = {**x.meta, "partitioner_tag": "is_backward"}
    after.meta.pop("eager_input_vals", None)  # the arguments of x's function, which Inductor would take for these
    reader.replace_input_with(x, after)
