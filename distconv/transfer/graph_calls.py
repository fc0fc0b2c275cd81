"""Calls a model's compiled graphs on tensors of any strides, and beneath autograd, which is not needed in them.

Autograd's functions for a collective are in Python, and each collective and each wait calls them, even where no
gradients are recorded. Within a compiled graph none are: forward and backward are a graph each. So autograd is left out
for the whole graph at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch import aot_autograd

from distconv.tensors.replacements import replace, until_put_back
from distconv.transfer.graph_merges import is_merging

KNOWN = ("_c10d_functional", "aten", "distconv", "prims")
"""Whose operators do not use autograd to compute a result; those of a program may."""


@until_put_back
def watch() -> None:
    """Has the graphs of distributed models called so from now on."""
    module: Any = aot_autograd
    stock = module.aot_stage2_compile

    def compiled(state: Any, capture: Any, partition: Any, *compilers: Any) -> Any:
        if is_merging():
            compilers = tuple(compiler and beneath_autograd(of_any_strides(compiler)) for compiler in compilers)
        return stock(state, capture, partition, *compilers)

    replace(module, "aot_stage2_compile", compiled)


def of_any_strides(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of graphs that read tensors by their shapes alone.

    A trace takes the strides of results from what torch knows of its kernels, which is wrong for some of them, such as
    pads, `roll` and gradients of norms of channels_last tensors. A view that the trace found possible may then not be,
    and on one rank alone, since each has pads and sends of its own.
    """

    def compile(graph: fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        graph.recompile()
        return compiler(graph, inputs)

    return compile


def beneath_autograd(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose graphs are called beneath autograd."""

    def compile(graph: fx.GraphModule, inputs: Any) -> Any:
        is_known = _is_known(graph)
        call = compiler(graph, inputs)
        if not is_known:
            return call

        @functools.wraps(call, assigned=())  # copies the attribute by which torch knows how arguments are passed
        def called(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call(*args)

        return torch.compiler.disable(called, reason="what is compiled is not traced")

    return compile


def _is_known(graph: fx.GraphModule) -> bool:
    """Whether a graph has collectives, and no operator of which it is unknown whether it needs autograd."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    spaces = {getattr(target, "namespace", None) for target in targets if target is not operator.getitem}
    return "_c10d_functional" in spaces and spaces <= {*KNOWN}
