"""Finds calls of modules that change state of Python: computed twice, such a call may have another result."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from distconv.turns.places_of_state import StatePlace, attribute_place
from distconv.turns.random_numbers import state_of
from distconv.turns.reach import Reach, ValueKind, kind_of

MOST = 1000  # The most items of a list or dict that are compared; of longer ones only the length is.

_STRUCTURE = ("_parameters", "_modules", "_buffers")  # Dicts of a module that are not compared item by item.


class StateChanges:
    """Counts changes of attributes of modules, and of arguments of calls, lists, dicts and generators of random numbers
    included, while the module is called.

    ``model``: whose state outside of modules is compared at the beginning and the end of each call, as far as `Reach`
    finds it: objects, global variables, attributes of classes, variables of functions, and generators.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._known: list[tuple[Callable[[], list[Any]], list[Any]]] = []
        self.count = 0
        if model is not None:
            reach = Reach(model)
            objects = (attribute_place(name, x) for name, x in reach.objects if not isinstance(x, nn.Module))
            for place in (*objects, *reach.places):
                self._add(functools.partial(_values, place))
            self._add(lambda: [*reach.generators])

    def begin(self, module: nn.Module) -> None:
        """Called before a module, and its own hooks, are called."""
        self.look()
        self.watch(module)

    def begin_forward(self, args: Any, kwargs: Any) -> None:
        """Called after the module's own hooks, with the arguments of its forward, whose tensors are not kept alive."""
        self.look()
        read, _ = self._known.pop()
        given = [x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor)]
        self._add(lambda: [*given, *read()])

    def watch(self, module: nn.Module, given: Any = ()) -> None:
        """Compares the attributes of a module, and some arguments, from now on."""

        def read() -> list[Any]:
            own = [value for name, value in vars(module).items() if name not in _STRUCTURE]
            return [given, *own, *map(id, module._buffers.values())]

        self._add(read)

    def end(self) -> None:
        """Called at the end of the call that began last."""
        self.look()
        self._known.pop()

    def look(self) -> None:
        """Counts the changes since the last comparison."""
        for number, (read, before) in enumerate(self._known):
            now = [*_flattened(read())]
            if len(now) != len(before) or not all(map(_is_same, before, now)):
                self.count += 1
                self._known[number] = read, [*map(_reference, now)]

    def _add(self, read: Callable[[], list[Any]]) -> None:
        self._known.append((read, [_reference(value) for value in _flattened(read())]))


def _values(place: StatePlace) -> list[Any]:
    return [*place.read().values()]


def _flattened(values: list[Any]) -> Iterator[Any]:
    """Values, and the items of lists, dicts and objects at any depth, but not of modules and objects of libraries."""
    waiting, seen = values, set[int]()
    while waiting:
        value = waiting.pop()
        kind = kind_of(value)
        if not isinstance(value, tuple):
            yield value
        if id(value) in seen or isinstance(value, nn.Module) or kind not in (ValueKind.CONTAINER, ValueKind.OBJECT):
            continue
        seen.add(id(value))
        items = value if kind is ValueKind.CONTAINER else attribute_place("", value).read()
        yield len(items)
        if len(items) <= MOST:
            waiting += [*items, *items.values()] if isinstance(items, dict) else items


def _reference(value: Any) -> Any:
    """A reference by which `_is_same` knows a value again. It does not keep tensors alive, as a call may free them."""
    if isinstance(value, Tensor):
        return weakref.ref(value), value._version
    if kind_of(value) is ValueKind.GENERATOR:
        return value, state_of(value)
    return value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(now, Tensor):
        return isinstance(before, tuple) and len(before) == 2 and before[0]() is now and before[1] == now._version
    if kind_of(now) is ValueKind.GENERATOR:
        return isinstance(before, tuple) and before[0] is now and before[1] == state_of(now)
    if isinstance(now, bool | int | float | str | bytes):
        return type(before) is type(now) and before == now
    return before is now
