"""Gathers parameters of a compiled graph again in backward, so that they need not be kept since forward.

Torch's partitioner would keep them. What it computes again, it decides on every rank by the rank's own graph, and a
rank with an empty shard may read a parameter in forward alone. So gathers are repeated only where all ranks would
repeat the same ones, between the same other collectives.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from distconv.transfer.graph_merges import are_equal_everywhere, is_merging
from distconv.transfer.unread import BACKWARD, gathered_parameter, pinned_graph

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def gather_again(graph: fx.Graph) -> None:
    """Repeats the gathers that backward reads. Collective over the ranks of the model that is compiled.

    ``graph``: forward and backward in one, before it is partitioned; it is changed.
    """
    chains = _chains(graph)
    if not chains or not is_merging():
        return
    place = {node: at for at, node in enumerate(graph.nodes)}
    collectives = (pinned_graph(node) == BACKWARD and node.target is not _WAIT for node in graph.nodes)
    before = dict(zip(graph.nodes, itertools.accumulate(collectives), strict=True))
    readers = {
        number: {x for node in chain for x in node.users if x.op == "call_function" and not _is_in_forward(x)}
        for number, chain in chains.items()
    }
    first = {number: min(found, key=place.__getitem__) for number, found in readers.items() if found}
    if not are_equal_everywhere([(number, before[reader]) for number, reader in first.items()]):
        return
    for number, reader in first.items():
        _repeat(graph, chains[number], reader, readers[number])


def _repeat(graph: fx.Graph, chain: list[fx.Node], first: fx.Node, readers: set[fx.Node]) -> None:
    """Repeats a chain before the first of its readers in backward, which then read the copy."""
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in chain:
            copies[node] = copied = graph.node_copy(node, lambda x: copies.get(x, x))
            collective = getattr(node.target, "namespace", None) == "_c10d_functional"
            copied.meta = {**node.meta, "partitioner_tag": BACKWARD if collective else "is_backward"}
    for node, copied in copies.items():
        node.replace_all_uses_with(copied, delete_user_cb=readers.__contains__)
    for copied in reversed(copies.values()):
        if not copied.users and copied.target is not _WAIT:
            graph.erase_node(copied)


def _chains(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By parameter: the nodes of forward that gather it, and views and copies of the result."""
    chains: dict[int, list[fx.Node]] = {}
    of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        number = gathered_parameter(node)
        found = {of.get(x) for x in node.all_input_nodes}
        is_cheap = node.target in _COPIES or getattr(node.target, "is_view", False)
        if number is None and len(found) == 1 and is_cheap:
            (number,) = found
        if number is not None and _is_in_forward(node):
            of[node] = number
            chains.setdefault(number, []).append(node)
    return chains


def _is_in_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("partitioner_tag") not in ("is_backward", BACKWARD)
