"""Functions whose results have shapes or values that depend on numbers, for a call that is followed without numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distconv.tensors.user_lines import script_line
from distconv.turns.asked_numbers import AskedNumbers, Kind, Question

Empty = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes a tensor without numbers, of a shape, a type and a device."""


class Selection(NamedTuple):
    """A function that selects some elements.

    Attributes:
        most: the most that it may select, from its arguments.
        result: its result, from what makes tensors, the number of selected elements, and its arguments.
        dim: the dim of its first result that counts them, from its arguments.
    """

    most: Callable[..., int]
    result: Callable[..., Any]
    dim: Callable[..., int] = lambda *_: 0


def _numel(x: Tensor, *_: Any) -> int:
    return x.numel()


def _both(x: Tensor, mask: Tensor) -> int:
    return math.prod(torch.broadcast_shapes(x.shape, mask.shape))


def _slices(x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> int:
    return x.numel() if dim is None else x.shape[dim]


def _numbers(empty: Empty, n: int, x: Tensor, *_: Any) -> Tensor:
    """Of boxes that do not overlap, [n]."""
    return empty((n,), torch.int64, x.device)


def _places(empty: Empty, n: int, x: Tensor) -> Tensor:
    """Of the elements that are not 0, [n, dims]."""
    return empty((n, x.dim()), torch.int64, x.device)


def _elements(empty: Empty, n: int, x: Tensor, mask: Tensor) -> Tensor:
    """Those of a mask, [n]."""
    return empty((n,), x.dtype, x.device)


def _unique(
    empty: Empty, n: int, x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Tensor, ...]:
    """The values, or slices along a dim; the number of each element or slice among them, and their counts, or [0]."""
    values = [n] if dim is None else [*x.shape]
    values[dim or 0] = n
    of_each = (x.shape if dim is None else (x.shape[dim],)) if inverse or counts else (0,)
    more = (of_each, (n if counts else 0,))
    return empty(values, x.dtype, x.device), *(empty(shape, torch.int64, x.device) for shape in more)


SELECTIONS = {
    "aten::nonzero": Selection(_numel, _places),
    "aten::masked_select": Selection(_both, _elements),
    "aten::unique_consecutive": Selection(_slices, _unique, lambda x, inverse=False, counts=False, dim=0: dim or 0),
    "aten::_unique2": Selection(
        _numel, lambda empty, n, x, _=True, inverse=False, counts=False: _unique(empty, n, x, inverse, counts)
    ),
    "aten::unique_dim": Selection(
        lambda x, dim, *_: x.shape[dim],
        lambda empty, n, x, dim, _=True, inverse=False, counts=False: _unique(empty, n, x, inverse, counts, dim),
        lambda x, dim, *_: dim,
    ),
    "torchvision::nms": Selection(lambda boxes, *_: boxes.shape[0], _numbers),
}
"""By the name of an operator."""

ELEMENTS = {"aten::_local_scalar_dense": lambda x: x.dtype, "aten::equal": lambda *_: torch.bool}
"""Operators that return a number of Python, with a function of its type."""

_INDEX = "aten::index"

ASKING = frozenset({*SELECTIONS, *ELEMENTS})
"""The operators of which `result_without_numbers` makes the results."""


def result_without_numbers(asked: AskedNumbers, empty: Empty, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of an operator of `SELECTIONS` or `ELEMENTS`."""
    if name in ELEMENTS:
        return asked.element(ELEMENTS[name](*args))
    selection = SELECTIONS[name]
    return selection.result(empty, asked.count(selection.most(*args, **kwargs)), *args, **kwargs)


def indices_without_masks(
    asked: AskedNumbers, empty: Empty, x: Tensor, indices: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The indices of a tensor with numbers in place of masks: each mask is one index for each of its dims, [n]."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            found.append(index)
        else:
            known = getattr(index, "constant", None)
            n = asked.count(index.numel()) if known is None else int(known.count_nonzero())
            found += [empty((n,), torch.int64, x.device) for _ in range(index.dim())]
    return found


def has_masks(indices: Sequence[Tensor | None]) -> bool:
    """Whether the shape of an indexed tensor depends on numbers."""
    return any(x is not None and _is_mask(x) for x in indices)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


class NumbersOfCall(TorchDispatchMode):
    """While it is entered, the answers are noted that operators give in the first thread that asks.

    Attributes:
        answers: by question.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Question, list[float]] = {}
        self._thread: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in ELEMENTS and not isinstance(result, complex):
            self._note(Kind.of(ELEMENTS[name](*args)), result)
        elif name in SELECTIONS:
            most, dim = (each(*args, **kwargs) for each in (SELECTIONS[name].most, SELECTIONS[name].dim))
            self._note(Kind.SHARE, tree_leaves(result)[0].shape[dim] / max(most, 1))
        elif name == _INDEX and has_masks(args[1]):
            self._note(Kind.SHARE, result.numel() / max(args[0].numel(), 1))
        return result

    def _note(self, kind: Kind, answer: float) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        if here == self._thread:
            self.answers.setdefault(Question(script_line(), kind), []).append(answer)
