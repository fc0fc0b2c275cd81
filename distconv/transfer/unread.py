"""Collectives of a graph in which the rank itself has no part: it does them all the same, and in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_library = torch.library.Library("distconv", "FRAGMENT")
_library.define("after(Tensor x, Tensor[] others) -> Tensor")

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"
"""What torch's partitioner reads in the graph of both ways: in which graph a collective stays."""

GATHERS = "distconv_gathers"
"""The key of a node's ``meta["custom"]``, and so of all nodes that are traced for it: which parameter it gathers."""


@torch.library.impl(_library, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, others: list[Tensor]) -> Tensor:
    """x, as something that a graph computes from others too."""
    return x.clone()


def gathers(node: fx.Node) -> int | None:
    """The number of the parameter that a node was traced to gather; None for others."""
    number: int | None = (node.meta.get("custom") or {}).get(GATHERS)
    return number


def side(node: fx.Node) -> str | None:
    """``FORWARD`` or ``BACKWARD`` of a collective that stays there, or of the wait for it."""
    is_ours = getattr(node.target, "namespace", None) == "_c10d_functional"
    tag = node.meta.get("partitioner_tag")
    return tag if is_ours and tag in (FORWARD, BACKWARD) else None


def read_all(graph: fx.Graph) -> None:
    """Lets each collective of backward be read by the next one, or by a gradient, where nothing else reads it.

    A compiler keeps for the graph of backward what its results are computed from. A rank whose part is empty computes
    nothing from what the others send: it would leave the collective out, and they would wait for it.

    And the first one reads a gradient that backward is given, where it would come before all that does: the compiler
    moves what comes before to where it is needed, so that a rank that sends nothing would do it later than the others.

    The cost is a copy of what then reads more, in such graphs alone.

    Args:
        graph: forward and backward in one, before it is parted; it is changed.
    """
    output = next(iter(graph.find_nodes(op="output")))
    needed, others = _needed(output), _first_reads(graph)
    for node in [node for node in graph.nodes if side(node) == BACKWARD]:
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
    """What the first collective of backward should read: a gradient that backward is given, if it comes before all use.

    Nothing where none is used at all: the compiler then leaves the order as it is.
    """
    given = [node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)]
    is_early = False
    for node in graph.nodes:
        if any(x in given for x in node.all_input_nodes):
            return given[:1] if is_early else []
        is_early = is_early or side(node) == BACKWARD
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
    after.meta.pop("eager_input_vals", None)  # the arguments of x's own function, by which Inductor would go
    reader.replace_input_with(x, after)
