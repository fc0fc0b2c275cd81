"""Corrects torch's compilers for graphs of DTensors' local tensors, and for graphs that differ from rank to rank.

The functions of torch that are replaced here were read in torch 2.13; networks in tests/distconv/found need it.

Parameters of a graph are gathered again in backward (`gather_again`), so that they need not be kept since forward.
Torch's partitioner would keep them. What it computes again, it decides on every rank by the rank's own graph, and a
rank with an empty shard may read a parameter in forward alone. So gathers are repeated only where all ranks would
repeat the same ones, between the same other collectives.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from distconv.tensors.dtensors import wrap_strided
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import replace, until_put_back
from distconv.transfer.graph_merges import are_equal_everywhere, is_merging, merge_all
from distconv.transfer.unread import BACKWARD, gathered_parameter, pinned_graph, read_collectives

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def watch_compilers() -> None:
    """Has torch's compilers corrected as soon as they take a DTensor apart, with which every trace of one begins."""
    tensors: Any = DTensor
    flatten = tensors.__tensor_flatten__

    @functools.wraps(flatten)
    def flattened(self: DTensor) -> Any:
        if "torch._dynamo.guards" in sys.modules:
            _guard_layouts()
        if "torch._functorch.partitioners" in sys.modules:  # else none compiles, and it takes a second to import
            _keep_number_of_collectives()
            _keep_unread_collectives()
            _count_changed_inputs()
            from distconv.transfer import graph_calls  # which imports torch's compilers

            graph_calls.watch()
        if "torch._inductor.compile_fx" in sys.modules:  # which imports the above
            _order_reads_after_waits()
            # Nothing is left to correct, and a compiled model may take DTensors apart at each step.
            tensors.__tensor_flatten__ = flatten
        return flatten(self)

    replace(tensors, "__tensor_flatten__", flattened)
    replace(tensors, "__tensor_unflatten__", staticmethod(_unflatten_by_known_specs(tensors.__tensor_unflatten__)))
    if hasattr(tensors, "_stable_hash_for_caching"):  # without it, no two processes have a key in common
        replace(tensors, "_stable_hash_for_caching", _uncached_in_files(tensors._stable_hash_for_caching))


def _unflatten_by_known_specs(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Makes the DTensors that a graph returns, such as gradients, with specs that were made before.

    Torch makes and verifies a new spec for each of them at every step.
    """

    @functools.wraps(stock)
    def unflatten(inner: dict[str, Any], context: Any, shape: Any, strides: Any) -> DTensor:
        local, mesh = inner["_local_tensor"], inner["device_mesh"]
        if type(local) is not Tensor or not is_ours(mesh):
            return stock(inner, context, shape, strides)
        placements, _, _, requires_grad = context
        return wrap_strided(local, mesh, placements, shape, strides, requires_grad)

    return unflatten


def _uncached_in_files(hash_of: Callable[[DTensor], str]) -> Callable[[DTensor], str]:
    """Keeps graphs of distconv's DTensors out of the files in which torch's compilers keep graphs of earlier runs.

    There, the key of a DTensor is its mesh, placements and global shape, which are the same on every rank: a rank would
    get the graph of another one, whose shards and neighbours differ (pytorch/pytorch#188390). Inductor's files are
    still used, as their keys are of the traced graph.
    """

    @functools.wraps(hash_of)
    def hash_of_others(self: DTensor) -> str:
        if is_ours(self.device_mesh):
            from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

            raise BypassAOTAutogradCache("the graphs of a DTensor differ from rank to rank")
        return hash_of(self)

    return hash_of_others


@until_put_back
def _guard_layouts() -> None:
    """Lets a graph's guards refer to the mesh of its inputs, and compare the shapes of whole tensors.

    Torch keeps a copy of the mesh for every DTensor, and compares all that is in it at every call of the graph. But it
    compares no shape of a whole tensor: a rank would call the graph for a batch of four with a batch of three, of which
    its own shard is as large, while another rank makes a new graph.
    """
    from torch._dynamo import guards

    stock = guards.check_dtensor_spec

    def is_same(value: Any, expected: Any) -> bool:
        return stock(value, expected) and (not is_ours(value.mesh) or value.shape == expected.shape)

    replace(guards, "extract_dtensor_spec", lambda guard, value: copy.copy(value))
    replace(guards, "check_dtensor_spec", is_same)


@until_put_back
def _keep_number_of_collectives() -> None:
    """Keeps the number of a graph's collectives, also where two have equal inputs on a rank.

    A rank that sends nothing twice would otherwise take part once where another rank, whose inputs differ, takes part
    twice. The compiler's elimination of common subexpressions leaves out the operators in its list of random ones. And
    its partitioner, for which all ranks have one graph, repeats a collective of forward in the graph of backward if its
    input is known there, unless it must be in forward.
    """
    from torch._functorch import compile_utils, partitioners

    operators = [getattr(torch.ops._c10d_functional, name) for name in (*COLLECTIVES, "wait_tensor")]
    replace(compile_utils, "rand_ops", [*compile_utils.rand_ops, *operators[:-1], torch.ops.distconv.drawn_whole])
    must_be_in_forward = partitioners._must_be_in_forward

    def kept_in_forward(node: torch.fx.Node) -> bool:
        of_forward = node.meta.get("partitioner_tag") == "is_forward"
        return must_be_in_forward(node) or (of_forward and getattr(node.target, "overloadpacket", None) in operators)

    replace(partitioners, "_must_be_in_forward", kept_in_forward)


@until_put_back
def _keep_unread_collectives() -> None:
    """Keeps collectives in a graph whose results the rank itself does not read.

    The partitioner takes out operators whose results nothing reads, so that a rank with an empty shard would not take
    part.
    """
    from torch._functorch import partitioners

    before, is_not_collective = partitioners.force_save_collectives, getattr(partitioners, "is_not_collective", None)

    def read_before(joint_module: torch.fx.GraphModule) -> None:
        merge_all(joint_module.graph)
        gather_again(joint_module.graph)
        read_collectives(joint_module.graph)
        before(joint_module)

    replace(partitioners, "force_save_collectives", read_before)
    if is_not_collective is not None:  # else nothing that is waited for is taken out

        def stays(node: torch.fx.Node) -> bool:
            tag = node.meta.get("partitioner_tag")
            return pinned_graph(node) is not None or tag == "is_forward" or is_not_collective(node)

        replace(partitioners, "is_not_collective", stays)


@until_put_back
def _count_changed_inputs() -> None:
    """Corrects the count of inputs that forward changes, and therefore returns before the tensors that it saves.

    Torch counts such inputs by the model's tensors and by their local tensors. A local tensor takes no gradient by
    itself, so its change could stay within the graph and is not counted, although the graph returns it as the tensor's.
    Torch then reads the strides of a saved tensor, and whether backward may overwrite it, from the output before it.
    """
    from torch._functorch._aot_autograd import graph_compile

    stages: Any = graph_compile
    indices_of = stages.compute_inner_mutated_inp_indices_from_subclass_meta

    def counted(tensors: Any, parts: Any) -> list[int]:
        indices: list[int] = indices_of(tensors, parts)
        more = len(indices) - parts.num_mutated_inp_runtime_indices
        parts.mutated_inp_runtime_indices = indices
        parts.num_mutated_inp_runtime_indices += more
        parts.num_forward_returns += more
        parts.num_forward += more
        return indices

    replace(stages, "compute_inner_mutated_inp_indices_from_subclass_meta", counted)


@until_put_back
def _order_reads_after_waits() -> None:
    """Makes Inductor read the result of a collective after the wait for it on processors, never before.

    To the compiler, the wait changes the result. When two loops of different extents become one
    (``SchedulerNode.recompute_size_and_body``), it determines anew what the loop reads, and takes the result before
    that change: the loop may then run before the wait, on memory to which nothing has been written. (A loop that also
    has ordering dependencies reads the changed one: pytorch/pytorch#177816.)
    """
    from torch._inductor import dependencies, scheduler

    node_type: Any = scheduler.SchedulerNode
    recompute = node_type.recompute_size_and_body
    added = dependencies.WeakDep, dependencies.StarDep

    @functools.wraps(recompute)
    def with_names(node: Any, *args: Any, **kwargs: Any) -> None:
        orders = [dependency for dependency in node.read_writes.reads if isinstance(dependency, added)]
        recompute(node, *args, **kwargs)
        for dependency in orders:
            node.add_fake_dep(dependency)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    replace(node_type, "recompute_size_and_body", with_names)


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
