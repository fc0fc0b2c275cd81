"""What torch's compilers would do to the collectives of a graph, and must not: they take all ranks to run one graph.

What is replaced here is torch's own, and was read in torch 2.13; networks in tests/distconv/found need it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


@functools.cache
def as_often_everywhere() -> None:
    """Collectives of a graph stay as many as they are, also where two of a rank have equal inputs.

    A rank that sends nothing twice would otherwise take part once where another rank, whose inputs differ, takes part
    twice. The compiler's elimination of common subexpressions leaves alone what is in its list of random operators. And
    its partitioner, for which all ranks have one graph, repeats a collective of forward in the graph of backward if
    what it sends is known there, unless it must be in forward.
    """
    from torch._functorch import compile_utils, partitioners

    operators = [getattr(torch.ops._c10d_functional, name) for name in (*COLLECTIVES, "wait_tensor")]
    compile_utils.rand_ops.extend(operators[:-1])
    must_be_in_forward = partitioners._must_be_in_forward

    def kept_in_forward(node: torch.fx.Node) -> bool:
        of_forward = node.meta.get("partitioner_tag") == "is_forward"
        return must_be_in_forward(node) or (of_forward and getattr(node.target, "overloadpacket", None) in operators)

    partitioners._must_be_in_forward = kept_in_forward


def read_after_waits() -> None:
    """Inductor reads on processors what a collective makes after the wait for it, never before.

    The wait is to the compiler a change of what the collective has made. When two loops of unlike extents become one
    (``SchedulerNode.recompute_size_and_body``), it works out anew what the loop reads, and takes the state before that
    change: the loop may then run before the wait, on memory that nothing has been written to. (A loop with ordering
    dependencies besides keeps the state after it: pytorch/pytorch#177816.)
    """
    if "torch._inductor.compile_fx" in sys.modules:  # else another backend compiles, and inductor takes long to import
        _names_kept()


@functools.cache
def _names_kept() -> None:
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

    node_type.recompute_size_and_body = with_names
