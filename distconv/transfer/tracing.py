"""Whether torch.compile traces what runs: then collectives are its functional ones, which a graph can hold."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


def is_traced(x: Tensor) -> bool:
    """Whether a tensor stands for one of a graph that is being made, and so has no values."""
    return type(x) is not Tensor and isinstance(x, FakeTensor | FunctionalTensor)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """What is traced within it stays in the graph, forward or backward, that is being traced."""
    if not traceback.has_preserved_node_meta():  # there are no two graphs yet
        yield
        return
    meta, tag = traceback.current_meta, "partitioner_tag"
    before = meta.get(tag)
    meta[tag] = "must_be_in_forward" if torch._C._current_graph_task_id() == -1 else "must_be_in_backward"
    try:
        yield
    finally:
        meta[tag] = before


COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor")


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


_library = torch.library.Library("distconv", "FRAGMENT")
_library.define("after(Tensor x, Tensor[] others) -> Tensor")


@torch.library.impl(_library, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, others: list[Tensor]) -> Tensor:
    """x, as something that a graph computes from others too."""
    return x.clone()


_unread: list[tuple[int, Tensor]] = []
"""What collectives have made of nothing in a backward that is traced, each with the number of its backward."""


def started(name: str, x: Tensor, *args: Any) -> Tensor:
    """A collective of a graph, which starts here: what it makes of x is there once ``arrived`` has waited for it.

    It stays in the graph, forward or backward, in which a rule called it. Otherwise a rank that sends nothing would do
    the one of backward in forward, since its input depends on no gradient, and another rank would not.
    """
    as_often_everywhere()
    with _kept():
        result: Tensor = getattr(torch.ops._c10d_functional, name)(_after_unread(x), *args)
    return result


def arrived(x: Tensor) -> Tensor:
    """What a collective of a graph has made. The wait stays in the graph, too, where nothing was received."""
    with _kept():
        result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    backward = torch._C._current_graph_task_id()
    if backward != -1 and not result.numel():
        _unread.append((backward, result))
    return result


def _after_unread(x: Tensor) -> Tensor:
    """x, computed after earlier collectives of this backward that have made nothing.

    A compiler saves for the graph of backward what its results are computed from. A rank that sends there something of
    forward, and receives nothing, would do without, and the others would wait for it.
    """
    backward = torch._C._current_graph_task_id()
    unread = [each for of, each in _unread if of == backward]
    _unread.clear()
    return torch.ops.distconv.after(x, unread) if unread else x


def constant(x: Tensor, like: Tensor) -> Tensor:
    """A tensor of a plan, as operators of the graph may read it where ``like`` is of one."""
    return torch.ops.aten.lift_fresh.default(x) if is_traced(like) else x


def planned(maxsize: int | None) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As ``functools.lru_cache``, for what shapes decide.

    While a graph is made, too, the tensors of a plan are real ones, and making it leaves no operators in the graph.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize=maxsize)
        @functools.wraps(function)
        def decide(*args: Any, **kwargs: Any) -> T:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return decide

    return decorate
