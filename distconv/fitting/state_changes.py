"""Finds calls of modules that change state of Python: computed twice, such a call may have another result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distconv.turns.comparison import contents_of
from distconv.turns.places_of_state import attribute_place
from distconv.turns.random_numbers import state_of
from distconv.turns.reach import Reach
from distconv.turns.value_kinds import ValueKind, kind_of

MOST = 1000  # The most items of a list or dict that are compared; of longer ones only the length is.

_STRUCTURE = ("_parameters", "_modules", "_buffers")  # Dicts of a module that are not compared item by item.


class StateChanges:
    """Counts changes of attributes of modules, and of arguments of calls, lists, dicts and generators of random numbers
    included, while the module is called.

    ``model``: whose state outside of modules is compared at the beginning and the end of each call, as far as `Reach`
    finds it: objects, global variables, attributes of classes, variables of functions, and generators.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._known: list[_Watched] = []
        self.count = 0
        if model is not None:
            reach = Reach(model)
            objects = (attribute_place(name, x) for name, x in reach.objects if not isinstance(x, nn.Module))
            for place in (*objects, *reach.places):
                self._known.append(_Watched(lambda place=place: [*place.read().values()]))  # type: ignore[misc]
            self._known.append(_Watched(lambda: [*reach.generators]))

    def begin(self, module: nn.Module) -> None:
        """Called before a module, and its own hooks, are called."""
        self.look()
        self.watch(module)

    def begin_forward(self, args: Any, kwargs: Any) -> None:
        """Called after the module's own hooks, with the arguments of its forward, whose tensors are not kept alive."""
        self.look()
        self.watch_values([x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor)])

    def watch(self, module: nn.Module) -> None:
        """Compares the attributes of a module from now on."""
        self._known.append(
            _Watched(
                lambda: [value for name, value in vars(module).items() if name not in _STRUCTURE],
                lambda: [*map(id, module._buffers.values())],
            )
        )

    def watch_values(self, values: list[Any]) -> None:
        """Compares some values from now on."""
        self._known.append(_Watched(values.copy))

    def end(self) -> None:
        """Called at the end of the call that began last."""
        self.look()
        del self._known[-2:]

    def look(self) -> None:
        """Counts the changes since the last comparison."""
        self.count += sum([each.has_changed() for each in self._known])


class _Watched:
    """Values that are compared with themselves at an earlier moment.

    Most have not changed: then every list, dict and object among them has the same items, which is found without a
    look at each of these. ``read``: returns the values. ``numbers``: returns what is compared besides, by equality.
    """

    def __init__(self, read: Callable[[], list[Any]], numbers: Callable[[], list[int]] = list) -> None:
        self._read, self._read_numbers = read, numbers
        self._note(*_flattened(read()), numbers())

    def has_changed(self) -> bool:
        """Whether values have changed since the last call."""
        numbers = self._read_numbers()
        if numbers == self._numbers and self._has_same_items():
            return False
        before, (found, containers) = self._before, _flattened(self._read())
        is_same = numbers == self._numbers and len(found) == len(before) and all(map(_is_same, before, found))
        self._note(found, containers, numbers)
        return not is_same

    def _note(self, found: list[Any], containers: list[Callable[[], Any]], numbers: list[int]) -> None:
        self._numbers = numbers
        self._before = [*map(_reference, found)]
        self._items = [(items, _identities(items())) for items in (self._read, *containers)]
        known = [*zip(found, self._before, strict=True)]
        self._tensors = [reference for x, reference in known if isinstance(x, Tensor)]
        self._generators = [reference for x, reference in known if kind_of(x) is ValueKind.GENERATOR]
        self._copied = [reference for x, reference in known if kind_of(x) is ValueKind.COPIED]

    def _has_same_items(self) -> bool:
        for items, identities in self._items:
            if _identities(items()) != identities:
                return False
        for reference, version in self._tensors:
            x = reference()
            if x is None or unwatched_version(x) != version:
                return False
        return all(state_of(x) == state for x, state in self._generators) and all(
            contents_of(x) == contents for x, contents in self._copied
        )


def unwatched_version(x: Tensor) -> int:
    """The version of a tensor. A mode for torch's functions is not asked for that of a plain one."""
    if type(x) not in (Tensor, nn.Parameter, FakeTensor):
        return x._version
    with torch._C.DisableTorchFunction():
        return x._version


def _identities(items: Any) -> list[int]:
    """The identities of items and their keys; of many items, their number."""
    if len(items) > MOST:
        return [len(items)]
    return [*map(id, items), *map(id, items.values())] if isinstance(items, dict) else [*map(id, items)]


def _items_of(value: Any) -> Callable[[], Any] | None:
    """Returns the items of a list or dict, or the attributes of an object; None for other values."""
    kind = kind_of(value)
    if kind is ValueKind.CONTAINER:
        return lambda: value
    return attribute_place("", value).read if kind is ValueKind.OBJECT and not isinstance(value, nn.Module) else None


def _flattened(values: list[Any]) -> tuple[list[Any], list[Callable[[], Any]]]:
    """Values, and the items of lists, dicts and objects at any depth, but not of modules and objects of libraries; and
    what returns the items of each of these."""
    waiting, seen, found, containers = values, set[int](), list[Any](), list[Callable[[], Any]]()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, tuple):
            found.append(value)
        if id(value) in seen or (items_of := _items_of(value)) is None:
            continue
        seen.add(id(value))
        containers.append(items_of)
        items = items_of()
        found.append(len(items))
        if len(items) <= MOST:
            waiting += [*items, *items.values()] if isinstance(items, dict) else items
    return found, containers


def _reference(value: Any) -> Any:
    """A reference by which `_is_same` knows a value again. It does not keep tensors alive, as a call may free them."""
    if isinstance(value, Tensor):
        return weakref.ref(value), unwatched_version(value)
    if kind_of(value) is ValueKind.GENERATOR:
        return value, state_of(value)
    if kind_of(value) is ValueKind.COPIED:
        return value, contents_of(value)
    return value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(now, Tensor):
        return (
            isinstance(before, tuple)
            and len(before) == 2
            and before[0]() is now
            and before[1] == unwatched_version(now)
        )
    if kind_of(now) is ValueKind.GENERATOR:
        return isinstance(before, tuple) and before[0] is now and before[1] == state_of(now)
    if kind_of(now) is ValueKind.COPIED:
        return isinstance(before, tuple) and before[0] is now and bool(before[1] == contents_of(now))
    if isinstance(now, bool | int | float | str | bytes):
        return type(before) is type(now) and before == now
    return before is now
