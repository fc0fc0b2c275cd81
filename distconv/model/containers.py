"""Lists and dicts among the inputs of a call: what the model changes in them, the caller finds in its own.

While a model runs, its inputs are other tensors than the caller's, so the lists and dicts with them are copies. An
example is a cache of features that passes from one call to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Container = list[Any] | dict[Any, Any] | deque[Any]


class Containers:
    """The lists and dicts of a caller, each beside the copy that the model is given."""

    def __init__(self, given: Any, entered: Any) -> None:
        self._pairs = [(own, copy, _items(own), _items(copy)) for own, copy in _pairs(given, entered)]

    def give_back(self, leaving: Callable[[Any], Any] = lambda item: item) -> None:
        """Puts into each of the caller's what the model has put into its copy, as ``leaving`` makes it.

        What the model was given and has left is what the caller had there.
        """
        for own, copy, before, entered in self._pairs:
            after = _items(copy)
            if len(after) == len(entered) and all(
                a[0] == b[0] and a[1] is b[1] for a, b in zip(after, entered, strict=True)
            ):
                continue
            originals = {id(received): item for (_, received), (_, item) in zip(entered, before, strict=True)}
            items = [(key, originals[id(item)] if id(item) in originals else leaving(item)) for key, item in after]
            own.clear()
            if isinstance(own, dict):
                own.update(items)
            else:
                own.extend(item for _, item in items)


def _pairs(given: Any, entered: Any) -> Iterator[tuple[Container, Container]]:
    if isinstance(given, list | dict | deque) and entered is not given:
        yield given, entered
    if isinstance(given, list | dict | deque | tuple):
        for (_, item), (_, copy) in zip(_items(given), _items(entered), strict=True):
            if item is not copy:
                yield from _pairs(item, copy)


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))
