"""Merges small collectives of a compiled graph: one collective moves the tensors of several.

The ranks wait for each other at each collective, and each costs a copy into its buffer and one out of it. Two of one
kind can be merged where neither needs the other's result: those of a block and of its shortcut, or in backward the
gradients that one convolution fetches and the inputs that another fetches once more.

The graph is that of forward and backward together, before torch partitions it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from distconv.tensors.mesh import whole_group
from distconv.transfer.merging import Collective, merged
from distconv.transfer.unread import FORWARD, gathered_parameter

MOST = 2**18
"""Bytes that a merged collective moves at most. Larger ones cost more for their bytes than for their calls, and merging
leaves less to compute meanwhile."""

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
_WAIT, _EXCHANGE = _functional.wait_tensor.default, _functional.all_to_all_single.default
_SUM, _GATHER = _functional.all_reduce.default, _functional.all_gather_into_tensor.default


class _Thread(threading.local):
    ranks: tuple[DeviceMesh, Callable[[], None]] | None = None
    """The mesh of the model that is compiled, and the function by which its ranks agree to go on."""


_thread = _Thread()


@contextlib.contextmanager
def merging(mesh: DeviceMesh, ready: Callable[[], None]) -> Iterator[None]:
    """A context in which graphs of a model are made on all ranks of this mesh.

    ``ready``: called before the ranks exchange anything. It raises where one of them could not make the graph.
    """
    outer, _thread.ranks = _thread.ranks, (mesh, ready)
    try:
        yield
    finally:
        _thread.ranks = outer


def is_merging() -> bool:
    """Whether this thread is within `merging`."""
    return _thread.ranks is not None


def merge_all(graph: fx.Graph) -> None:
    """Merges collectives of a graph, if all ranks have the same list of them. Collective over the mesh.

    ``graph``: forward and backward in one; it is changed.
    """
    if _thread.ranks is None:
        return
    mesh, _ = _thread.ranks
    starts = [node for node in graph.nodes if _is_collective(node) and node.target is not _WAIT]
    kinds, dependencies = _kinds(starts), _dependencies(graph, starts)
    if not are_equal_everywhere(kinds):
        return  # ranks with empty shards may lack some collectives
    with _outside_of_torch():
        sizes, dependencies = _of_any_rank([_size(node) for node in starts], dependencies, mesh)
    plan = merged([Collective(*each) for each in zip(kinds, sizes, dependencies, strict=True)], MOST)
    if len(plan) == len(starts):
        return
    place = {node: index for index, node in enumerate(graph.nodes)}
    order = [_merge(graph, [starts[index] for index in members], place) for members in plan]
    chains = order, _effects(graph)
    after = {node: {before} for chain in chains for before, node in itertools.pairwise(chain)}
    _sort(graph, place, after)


@contextlib.contextmanager
def _outside_of_torch() -> Iterator[None]:
    """A context in which ranks that compile may call collectives.

    Torch's Python dispatcher, which is on while it compiles, has the interpreter's lock when a collective takes Gloo's
    lock. A thread of Gloo that frees the tensor of an earlier collective takes the two in the other order: deadlock.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


def are_equal_everywhere(values: Sequence[Any]) -> bool:
    """Whether all ranks of the model that is compiled have values of the same text. Collective over its mesh."""
    assert _thread.ranks is not None
    mesh, ready = _thread.ranks
    here = zlib.crc32(repr(values).encode())
    with _outside_of_torch():
        ends = torch.tensor([here, -here])
        if mesh.size() > 1:
            ready()
            ends = ends.to(mesh.device_type)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=whole_group(mesh))
        most, least = ends.tolist()
    return bool(most == -least)


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _effects(graph: fx.Graph) -> list[fx.Node]:
    """The operators besides collectives whose order must not change: they change memory or draw random numbers."""
    return [
        node for node in graph.nodes if node.op == "call_function" and node.is_impure() and not _is_collective(node)
    ]


def _dependencies(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[int]:
    """For every collective an integer with a bit for each other one whose result it needs."""
    bit = {node: 1 << place for place, node in enumerate(starts)}
    effects = set(_effects(graph))
    found: dict[fx.Node, int] = {}
    last = 0
    for node in graph.nodes:
        needed = 0
        for each in node.all_input_nodes:
            needed |= found[each] | bit.get(each, 0)
        if node in effects:
            last = needed = needed | last
        found[node] = needed
    return [found[node] for node in starts]


def _kinds(starts: Sequence[fx.Node]) -> list[Any]:
    """The properties that must be equal for collectives to be merged, as values with the same text on all ranks.

    Groups are numbered, as names may differ from rank to rank.
    """
    groups: dict[Any, int] = {}
    kinds: list[Any] = []
    for place, node in enumerate(starts):
        args: tuple[Any, ...] = node.args
        if not _can_be_merged(node):
            kinds.append((place, node.target))
            continue
        value, group = args[0].meta["val"], groups.setdefault(args[-1], len(groups))
        op = args[1] if node.target is _SUM else None
        kinds.append((_is_forward(node), node.target, op, group, value.dtype, value.device.type))
    return kinds


def _can_be_merged(node: fx.Node) -> bool:
    if gathered_parameter(node) is not None:  # it is gathered just before its use, merged it would be alive for longer
        return False
    return node.target in (_EXCHANGE, _SUM, _GATHER) and [user.target for user in node.users] == [_WAIT]


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_forward", FORWARD)


def _size(node: fx.Node) -> int:
    args: tuple[Any, ...] = node.args
    return int(args[0].meta["val"].nbytes) if _can_be_merged(node) else 0


def _of_any_rank(sizes: Sequence[int], dependencies: Sequence[int], mesh: DeviceMesh) -> tuple[list[int], list[int]]:
    """The sizes, maximized over the ranks, and the dependencies of all ranks together. Collective over the mesh."""
    count = len(sizes)
    table = torch.zeros(count, count + 1, dtype=torch.int64)
    for row, needed in enumerate(dependencies):
        table[row, :count] = torch.tensor([needed >> column & 1 for column in range(count)])
    table[:, count] = torch.tensor(sizes)
    if mesh.size() > 1:
        table = table.to(mesh.device_type)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=whole_group(mesh))
    rows = table.tolist()
    return [row[count] for row in rows], [sum(bit << at for at, bit in enumerate(row[:count])) for row in rows]


def _merge(graph: fx.Graph, members: Sequence[fx.Node], place: dict[fx.Node, int]) -> fx.Node:
    """Replaces several collectives by one, and returns it. The graph has to be sorted afterwards.

    ``place``: the place of each node, by which the graph will be sorted; new nodes are added.
    """
    first = members[0]
    if len(members) == 1:
        return first
    target, (_, *arguments) = first.target, first.args
    waits = [next(iter(node.users)) for node in members]
    given: list[tuple[Any, ...]] = [node.args for node in members]
    sender = _GraphBuilder(graph, first, place, place[first])
    receiver = _GraphBuilder(graph, first, place, min(place[wait] for wait in waits))
    flat = [sender.shaped(args[0], (args[0].meta["val"].numel(),)) for args in given]
    received, sent = ([args[at] for args in given] for at in (1, 2)) if target is _EXCHANGE else ([], [])
    if target is _EXCHANGE:  # sends each peer the pieces of all members, one after another
        pieces_of = [sender.parts(x, counts) for x, counts in zip(flat, sent, strict=True)]
        flat = [piece for of_peer in zip(*pieces_of, strict=True) for piece in of_peer]
        arguments[:2] = ([sum(counts) for counts in zip(*of, strict=True)] for of in (received, sent))
    start = sender.call(target, sender.joined(flat), *arguments)
    start.meta = {**first.meta, "val": start.meta["val"]}
    whole = receiver.call(_WAIT, start)
    whole.meta = {**waits[0].meta, "val": whole.meta["val"]}
    if target is _EXCHANGE:
        pieces = receiver.parts(whole, [count for of_peer in zip(*received, strict=True) for count in of_peer])
        results = [receiver.joined(pieces[at :: len(members)]) for at in range(len(members))]
    else:
        extents = [x.meta["val"].numel() for x in flat]
        ranks = first.args[1] if target is _GATHER else 1
        results = receiver.parts(receiver.shaped(whole, (ranks, sum(extents))), extents, 1)  # type: ignore[arg-type]
    for node, wait, result in zip(members, waits, results, strict=True):
        wait.replace_all_uses_with(receiver.shaped(result, wait.meta["val"].shape))
        graph.erase_node(wait)
        graph.erase_node(node)
    return start


class _GraphBuilder:
    """Adds operators to a graph whose nodes will be sorted by their places."""

    def __init__(self, graph: fx.Graph, like: fx.Node, place: dict[fx.Node, int], at: int) -> None:
        """
        Args:
            like: a node of the same side, forward or backward.
            at: the place of the new nodes.
        """
        self._graph, self._place, self._at = graph, place, at
        tag = "is_forward" if _is_forward(like) else "is_backward"
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


def _sort(graph: fx.Graph, place: dict[fx.Node, int], after: dict[fx.Node, set[fx.Node]]) -> None:
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
