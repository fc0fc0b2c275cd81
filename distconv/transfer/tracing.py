"""Says whether torch.compile traces a tensor, and caches plans so that they also work while it traces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from distconv.tensors import hooks

T = TypeVar("T")


def is_traced(x: Tensor) -> bool:
    """Whether a tensor represents one of a graph that is being traced, and so has no values."""
    return type(x) is not Tensor and has_no_numbers(x) and not _following.get()


def has_no_numbers(x: Tensor) -> bool:
    """Whether a tensor is traced, or only its shape is followed."""
    return type(x) is not Tensor and isinstance(x, FakeTensor | FunctionalTensor)


_following = ContextVar("following", default=False)  # parts in turn have their caller's context


@contextlib.contextmanager
def shapes_followed() -> Iterator[None]:
    """A context in which tensors without numbers are of no graph: code takes the paths of real tensors."""
    before = _following.set(True)
    try:
        yield
    finally:
        _following.reset(before)


def constant(x: Tensor, like: Tensor) -> Tensor:
    """A tensor of a plan, in a form that operators of a graph may read if ``like`` is traced."""
    return torch.ops.aten.lift_fresh.default(x) if is_traced(like) else x


_plans: list[Callable[[], None]] = []


def forget_plans(*_: object) -> None:
    """Every plan is made anew from now on."""
    for clear in _plans:
        clear()


hooks.after_jobs.append(forget_plans)


def planned(maxsize: int | None) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As ``functools.lru_cache``, for plans, which are made from shapes.

    The tensors of a plan are real ones, and making it leaves no operators in a graph, even while one is traced.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize=maxsize)
        @functools.wraps(function)
        def decide(*args: Any, **kwargs: Any) -> T:
            with _disable_current_modes():
                return function(*args, **kwargs)

        _plans.append(decide.cache_clear)
        return decide

    return decorate
