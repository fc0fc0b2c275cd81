"""Parameters that sharded ones have replaced. A script's lists and optimizers may still contain them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T", bound=Tensor | None)


class Replaced(nn.Parameter):
    """An old parameter, now without a value: functions of it are computed with the one that has replaced it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Replaced, current, args), **tree_map_only(Replaced, current, kwargs or {}))

    data = property(lambda self: current(self).data, lambda self, value: setattr(current(self), "data", value))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(current(self))


successors: Any = WeakIdKeyDictionary()  # From each replaced parameter to the one that has replaced it.


def current(parameter: T) -> T:
    """The parameter itself, or the one that has replaced it; None for None."""
    found: T = successors[parameter] if type(parameter) is Replaced else parameter
    return found


@contextlib.contextmanager
def replaced_by(others: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """A context in which replaced parameters represent others, which are given by the ids of the sharded ones."""
    before = {old: now for old, now in successors.items() if id(now) in others}
    successors.update((old, others[id(now)]) for old, now in before.items())
    try:
        yield
    finally:
        successors.update(before)
