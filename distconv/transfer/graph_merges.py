"""Merges small collectives of a compiled graph: one collective moves the tensors of several.

The ranks wait for each other at each collective, and each costs a copy into its buffer and one out of it. Two of one
kind can be merged where neither needs the other's result: those of a block and of its shortcut, or in backward the
gradients that one convolution fetches and the inputs that another fetches once more.

The graph is that of forward and backward together, before torch partitions it.
"""

from __future__ import annotations

import contextlib
import functools
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
from distconv.transfer.graph_builder import GraphBuilder, is_of_forward, sort_graph
from distconv.transfer.merging import Collective, merged
from distconv.transfer.unread import gathered_parameter

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
    sort_graph(graph, place, after)


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
        kinds.append((is_of_forward(node), node.target, op, group, value.dtype, value.device.type))
    return kinds


def _can_be_merged(node: fx.Node) -> bool:
    if gathered_parameter(node) is not None:  # it is gathered just before its use, merged it would be alive for longer
        return False
    return node.target in (_EXCHANGE, _SUM, _GATHER) and [user.target for user in node.users] == [_WAIT]


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
    waits = [next(iter(node.users)) for node in members]
    sender = GraphBuilder(graph, first, place, place[first])
    receiver = GraphBuilder(graph, first, place, min(place[wait] for wait in waits))
    given: list[tuple[Any, ...]] = [node.args for node in members]
    flat = [sender.shaped(args[0], (args[0].meta["val"].numel(),)) for args in given]
    divide: Callable[[fx.Node], list[fx.Node]]
    if first.target is _EXCHANGE:
        flat, arguments, divide = _exchanged_together(given, flat, sender, receiver)
    else:
        arguments, ranks = given[0][1:], given[0][1] if first.target is _GATHER else 1
        divide = functools.partial(_side_by_side, [x.meta["val"].numel() for x in flat], ranks, receiver)
    start = sender.call(first.target, sender.joined(flat), *arguments)
    start.meta = {**first.meta, "val": start.meta["val"]}
    whole = receiver.call(_WAIT, start)
    whole.meta = {**waits[0].meta, "val": whole.meta["val"]}
    for node, wait, result in zip(members, waits, divide(whole), strict=True):
        wait.replace_all_uses_with(receiver.shaped(result, wait.meta["val"].shape))
        graph.erase_node(wait)
        graph.erase_node(node)
    return start


def _exchanged_together(
    given: Sequence[tuple[Any, ...]], flat: Sequence[fx.Node], sender: GraphBuilder, receiver: GraphBuilder
) -> tuple[list[fx.Node], tuple[Any, ...], Callable[[fx.Node], list[fx.Node]]]:
    """For exchanges of all with all: what one exchange sends, its other arguments, and what divides its result.

    Each peer is sent the pieces of all members, one after another.

    Args:
        given: the arguments of each member: a tensor, counts received and sent by peer, the group.
        flat: the members' tensors, flat.
    """
    received, sent = ([args[at] for args in given] for at in (1, 2))
    pieces_of = [sender.parts(x, counts) for x, counts in zip(flat, sent, strict=True)]
    pieces = [piece for of_peer in zip(*pieces_of, strict=True) for piece in of_peer]
    totals = ([sum(counts) for counts in zip(*of, strict=True)] for of in (received, sent))

    def divide(whole: fx.Node) -> list[fx.Node]:
        arrived = receiver.parts(whole, [count for of_peer in zip(*received, strict=True) for count in of_peer])
        return [receiver.joined(arrived[at :: len(given)]) for at in range(len(given))]

    return pieces, (*totals, *given[0][3:]), divide


def _side_by_side(extents: Sequence[int], ranks: int, receiver: GraphBuilder, whole: fx.Node) -> list[fx.Node]:
    """Divides the sum, or what was gathered of some ranks, of tensors of these extents one after another."""
    return receiver.parts(receiver.shaped(whole, (ranks, sum(extents))), extents, 1)
