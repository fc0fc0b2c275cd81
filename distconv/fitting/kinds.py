"""The kinds of a model's calls: calls of one kind take the same time and memory, so that one of them is followed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.model.model_modules import modules_of
from distconv.turns.following import call_kind

MOST = 64  # Kinds of a model's calls that are remembered.

EXACT = 16  # Once so many kinds are known, integers are distinguished by their type alone, as floats always are.

_TRAINING = operator.attrgetter("training")

T = TypeVar("T")


class CallKind(NamedTuple):
    """``how`` the model is called, but for sizes; the first item is whether autograd records the call. ``sizes``: the
    shapes of the input tensors."""

    how: tuple[Any, ...]
    sizes: tuple[torch.Size, ...]


def kind_of_call(module: nn.Module, args: Any, kwargs: Any, inputs: Sequence[Tensor], known: int) -> CallKind:
    """The kind of a call. ``inputs``: the tensors among its arguments; ``known``: the number of kinds known already.

    Strings, bools and integers are distinguished by their values, and floats, such as a time, by their type.
    """
    by_value = str | bool | int if known < EXACT else str | bool
    others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, str | bool | int | float)]
    values = tuple((type(x), x if isinstance(x, by_value) else None) for x in others)
    modes = tuple(map(_TRAINING, modules_of(module)))
    tensors = tuple((x.dtype, x.dim()) for x in inputs)
    return CallKind((*call_kind(module, inputs)[:4], modes, values, tensors), tuple(x.shape for x in inputs))


def known_of_larger(kind: CallKind, known: Mapping[CallKind, T]) -> list[T]:
    """The results of known calls that differ from a call only in inputs that are as large, or larger, in each dim."""
    return [found for other, found in known.items() if other.how == kind.how and _covers(other.sizes, kind.sizes)]


def _covers(larger: Sequence[torch.Size], smaller: Sequence[torch.Size]) -> bool:
    """Whether no size is smaller. A dim of one element, which may be broadcast, covers no other, and none covers it."""
    pairs = [pair for sizes in zip(larger, smaller, strict=True) for pair in zip(*sizes, strict=True)]
    return all(a == b or a > b > 1 for a, b in pairs)
