"""Lists and dicts among the inputs of a call: changes that the model makes in them are made in the caller's too.

While a model runs, its inputs are other tensors than the caller's, so it is given copies of the lists and dicts that
contain them. An example is a cache of features that passes from one call to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Container = list[Any] | dict[Any, Any] | deque[Any]


class Containers:
    """The lists and dicts of a caller, each beside the copy that the model is given."""

    def __init__(self, given: Any, entered: Any) -> None:
        self._pairs = [(callers, copy, _items(callers), _items(copy)) for callers, copy in _pairs(given, entered)]

    def give_back(self, converted: Callable[[Any], Any] = lambda item: item) -> None:
        """Makes the changes of each copy in the caller's list or dict.

        An item that the model was given becomes the caller's original again; any other one is ``converted``.
        """
        for callers, copy, before, entered in self._pairs:
            after = _items(copy)
            if len(after) == len(entered) and all(
                a[0] == b[0] and a[1] is b[1] for a, b in zip(after, entered, strict=True)
            ):
                continue
            originals = {id(received): item for (_, received), (_, item) in zip(entered, before, strict=True)}
            items = [(key, originals[id(item)] if id(item) in originals else converted(item)) for key, item in after]
            callers.clear()
            if isinstance(callers, dict):
                callers.update(items)
            else:
                callers.extend(item for _, item in items)


def _pairs(given: Any, entered: Any) -> Iterator[tuple[Container, Container]]:
    if isinstance(given, list | dict | deque) and entered is not given:
        yield given, entered
    if isinstance(given, list | dict | deque | tuple):
        for (_, item), (_, copy) in zip(_items(given), _items(entered), strict=True):
            if item is not copy:
                yield from _pairs(item, copy)


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))
