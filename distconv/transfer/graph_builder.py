"""Adds operators to a compiled graph of forward and backward, and sorts its nodes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from distconv.transfer.unread import FORWARD

_aten = torch.ops.aten


def is_of_forward(node: fx.Node) -> bool:
    """Whether a node of such a graph belongs to forward."""
    return node.meta.get("partitioner_tag") in ("is_forward", FORWARD)


class GraphBuilder:
    """Adds operators to a graph whose nodes will be sorted by their places."""

    def __init__(self, graph: fx.Graph, like: fx.Node, place: dict[fx.Node, int], at: int) -> None:
        """
        Args:
            like: a node of the same side, forward or backward.
            at: the place of the new nodes.
        """
        self._graph, self._place, self._at = graph, place, at
        tag = "is_forward" if is_of_forward(like) else "is_backward"
        self._meta = {key: like.meta[key] for key in like.meta if key not in ("recompute", "tensor_meta")}
        self._meta["partitioner_tag"] = tag

    def call(self, target: Any, *args: Any) -> fx.Node:
        with self._graph.inserting_before(self._graph.output_node()):
            node = self._graph.call_function(target, args)
        values = fx.map_arg(args, lambda x: x.meta["val"])
        with self._meta["val"].fake_mode:
            node.meta = {**self._meta, "val": target(*values)}
        self._place[node] = self._at
        return node

    def shaped(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        value = x.meta["val"]
        if value.shape == tuple(shape):
            return x
        return self.call(
            _aten.view.default, x if value.is_contiguous() else self.call(_aten.clone.default, x), list(shape)
        )

    def joined(self, pieces: Sequence[fx.Node]) -> fx.Node:
        """Flat pieces one after another; those without elements are left out."""
        filled = [piece for piece in pieces if piece.meta["val"].numel()] or pieces[:1]
        return filled[0] if len(filled) == 1 else self.call(_aten.cat.default, list(filled))

    def parts(self, x: fx.Node, extents: Sequence[int], dim: int = 0) -> list[fx.Node]:
        """The parts of a tensor, one after another along a dim."""
        stops = list(itertools.accumulate(extents))
        return [
            self.call(_aten.slice.Tensor, x, dim, stop - extent, stop)
            for extent, stop in zip(extents, stops, strict=True)
        ]


def sort_graph(graph: fx.Graph, place: dict[fx.Node, int], after: dict[fx.Node, set[fx.Node]]) -> None:
    """Sorts the nodes by place, but each after the nodes that it reads and those in ``after``."""
    nodes, output = list(graph.nodes), graph.output_node()
    left = {node: {*node.all_input_nodes, *after.get(node, ())} for node in nodes}
    readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node, needed in left.items():
        for each in needed:
            readers[each].append(node)
    count = itertools.count()
    ready = [(place[node], next(count), node) for node in nodes if not left[node]]
    heapq.heapify(ready)
    for _ in nodes:
        node = heapq.heappop(ready)[2]
        if node is not output:
            output.prepend(node)
        for reader in readers[node]:
            left[reader].discard(node)
            if not left[reader]:
                heapq.heappush(ready, (place[reader], next(count), reader))
