"""What torch's compilers get wrong in the graph of a DTensor's parts, and on graphs that differ from rank to rank.

What is replaced here is torch's own, and was read in torch 2.13; networks in tests/distconv/found need it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.tensors.dtensors import wrap_strided
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import replace, until_put_back
from distconv.transfer.graph_merges import merge_all
from distconv.transfer.graph_regathers import gather_again
from distconv.transfer.unread import read_all, side

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def watch_compilers() -> None:
    """Has torch's compilers mended where they take the first DTensor apart, which every trace of one begins with.

    And where they look for a graph of one that they have made before.
    """
    tensors: Any = DTensor
    flatten = tensors.__tensor_flatten__

    @functools.wraps(flatten)
    def flattened(self: DTensor) -> Any:
        if "torch._dynamo.guards" in sys.modules:
            _guarded_quickly()
        if "torch._functorch.partitioners" in sys.modules:  # else none compiles, and it takes a second to import
            _as_often_everywhere()
            _unread_too()
            _saved_behind_changed()
            _beneath_autograd()
        if "torch._inductor.compile_fx" in sys.modules:  # which imports the above
            _read_after_waits()
            # Nothing is left to mend, and a compiled model may take DTensors apart at each step.
            tensors.__tensor_flatten__ = flatten
        return flatten(self)

    replace(tensors, "__tensor_flatten__", flattened)
    replace(tensors, "__tensor_unflatten__", staticmethod(_together(tensors.__tensor_unflatten__)))
    if hasattr(tensors, "_stable_hash_for_caching"):  # without it, no two processes have a key in common
        replace(tensors, "_stable_hash_for_caching", _hashed(tensors._stable_hash_for_caching))


def _together(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Makes the DTensors that a graph returns, such as gradients, by descriptions that were made before.

    Torch makes and verifies a new one for each of them at every step.
    """

    @functools.wraps(stock)
    def together(inner: dict[str, Any], context: Any, shape: Any, strides: Any) -> DTensor:
        local, mesh = inner["_local_tensor"], inner["device_mesh"]
        if type(local) is not Tensor or not is_ours(mesh):
            return stock(inner, context, shape, strides)
        placements, _, _, requires_grad = context
        return wrap_strided(local, mesh, placements, shape, strides, requires_grad)

    return together


def _hashed(hash_of: Callable[[DTensor], str]) -> Callable[[DTensor], str]:
    """Keeps graphs of our DTensors out of the files in which torch's compilers find what they made in earlier runs.

    There, a DTensor is known by its mesh, placements and global shape, which are the same on every rank: a rank would
    get the graph of another one, whose parts and neighbours differ (pytorch/pytorch#188390). What inductor makes of a
    traced graph it still finds, as that is known by the graph itself.
    """

    @functools.wraps(hash_of)
    def of_others(self: DTensor) -> str:
        if is_ours(self.device_mesh):
            from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

            raise BypassAOTAutogradCache("the graphs of a DTensor differ from rank to rank")
        return hash_of(self)

    return of_others


@until_put_back
def _guarded_quickly() -> None:
    """Lets a graph remember the layouts of its inputs with their mesh itself, which is compared at once.

    Torch keeps a copy of the mesh for every DTensor, and compares all that is in it at every call of the graph. But it
    compares no shape of a whole tensor: a rank would take the graph of a batch of four for one of three, of which its
    own part is as large, while another rank makes a new one.
    """
    from torch._dynamo import guards

    stock = guards.check_dtensor_spec

    def is_same(value: Any, expected: Any) -> bool:
        return stock(value, expected) and (not is_ours(value.mesh) or value.shape == expected.shape)

    replace(guards, "extract_dtensor_spec", lambda guard, value: copy.copy(value))
    replace(guards, "check_dtensor_spec", is_same)


@until_put_back
def _as_often_everywhere() -> None:
    """Collectives of a graph stay as many as they are, also where two of a rank have equal inputs.

    A rank that sends nothing twice would otherwise take part once where another rank, whose inputs differ, takes part
    twice. The compiler's elimination of common subexpressions leaves alone what is in its list of random operators. And
    its partitioner, for which all ranks have one graph, repeats a collective of forward in the graph of backward if
    what it sends is known there, unless it must be in forward.
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
def _unread_too() -> None:
    """Collectives stay in a graph, too, where the rank itself reads nothing of what they make.

    The partitioner takes out what nobody reads, so that a rank whose part is empty would not take part.
    """
    from torch._functorch import partitioners

    before, is_not_collective = partitioners.force_save_collectives, getattr(partitioners, "is_not_collective", None)

    def read_before(joint_module: torch.fx.GraphModule) -> None:
        merge_all(joint_module.graph)
        gather_again(joint_module.graph)
        read_all(joint_module.graph)
        before(joint_module)

    replace(partitioners, "force_save_collectives", read_before)
    if is_not_collective is not None:  # else nothing that is waited for is taken out

        def stays(node: torch.fx.Node) -> bool:
            tag = node.meta.get("partitioner_tag")
            return side(node) is not None or tag == "is_forward" or is_not_collective(node)

        replace(partitioners, "is_not_collective", stays)


@until_put_back
def _beneath_autograd() -> None:
    """Graphs of a model are called beneath autograd."""
    from distconv.transfer import graph_calls  # which imports torch's compilers

    graph_calls.watch()


@until_put_back
def _saved_behind_changed() -> None:
    """Makes torch find what forward saves after the inputs that it changes and therefore returns.

    torch counts those inputs twice: by the tensors of the model, and by their parts. A part takes no gradient by
    itself, so its change could stay within the graph and is not counted, although the graph returns it as the tensor's.
    The strides of what is saved, and what of it backward may overwrite, were then those of the output before it.
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
def _read_after_waits() -> None:
    """Inductor reads on processors what a collective makes after the wait for it, never before.

    The wait is to the compiler a change of what the collective has made. When two loops of unlike extents become one
    (``SchedulerNode.recompute_size_and_body``), it works out anew what the loop reads, and takes the state before that
    change: the loop may then run before the wait, on memory that nothing has been written to. (A loop with ordering
    dependencies besides keeps the state after it: pytorch/pytorch#177816.)
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
