"""Collectives of a graph whose results the rank itself does not read: it takes part in them all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_library = torch.library.Library("distconv", "FRAGMENT")
_library.define("after(Tensor x, Tensor[] others) -> Tensor")

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"
"""What torch's partitioner reads in the graph of both ways: in which graph a collective stays."""


@torch.library.impl(_library, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, others: list[Tensor]) -> Tensor:
    """x, as something that a graph computes from others too."""
    return x.clone()


def side(node: fx.Node) -> str | None:
    """``FORWARD`` or ``BACKWARD`` of a collective that stays there, or of the wait for it."""
    is_ours = getattr(node.target, "namespace", None) == "_c10d_functional"
    tag = node.meta.get("partitioner_tag")
    return tag if is_ours and tag in (FORWARD, BACKWARD) else None


def read_all(graph: fx.Graph) -> None:
    """Lets each collective of backward be read by the next one, or by a gradient, where nothing else reads it.

    A compiler keeps for the graph of backward what its results are computed from. A rank whose part is empty computes
    nothing from what the others send: it would leave the collective out, and they would wait for it. The cost is a copy
    of what then reads it, in such graphs alone.

    Args:
        graph: forward and backward in one, before it is parted; it is changed.
    """
    output = next(iter(graph.find_nodes(op="output")))
    needed = _needed(output)
    unread: list[fx.Node] = []
    for node in list(graph.nodes):
        if side(node) != BACKWARD:
            continue
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            if node not in needed:
                unread.append(node)
        elif unread:
            _read(graph, node, node.args[0], unread)
            unread = []
    gradients = [x for x in output.all_input_nodes if x.meta.get("partitioner_tag") in ("is_backward", BACKWARD)]
    if unread and gradients:
        _read(graph, output, min(gradients, key=lambda x: int(x.meta["val"].numel())), unread)


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


def _read(graph: fx.Graph, reader: fx.Node, x: Any, unread: list[fx.Node]) -> None:
    with graph.inserting_before(reader):
        after = graph.call_function(torch.ops.distconv.after.default, (x, unread))
    after.meta = {**x.meta, "partitioner_tag": "is_backward"}
    reader.replace_input_with(x, after)
