"""Finds calls of modules that change state of Python: computed twice, such a call may have another result."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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

    def begin(self, module: nn.Module, has_hooks: bool) -> None:
        """Called before a module, and its own hooks, are called. ``has_hooks``: whether there are such hooks; else
        nothing can change before `begin_forward` looks."""
        if has_hooks:
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
                (functools.partial(vars, module), functools.partial(getattr, module, "_buffers")),
            )
        )

    def watch_values(self, values: list[Any]) -> None:
        """Compares some values from now on; of lists, dicts and objects those that are not compared already, as they
        were given to a module that is being called, too."""
        known: dict[int, Any] = {}
        for each in self._known:
            known |= each.containers
        self._known.append(_Watched(values.copy, known=known))

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
    look at each of these.

    Args:
        read: returns the values.
        numbers: returns what is compared besides, by equality.
        dicts: return those that both come from; if not given, the list that ``read`` returns is compared.
        known: lists, dicts and objects whose items are not compared, by identity.

    Attributes:
        containers: the lists, dicts and objects whose items are compared, by identity.
    """

    def __init__(
        self,
        read: Callable[[], list[Any]],
        numbers: Callable[[], list[int]] = list,
        dicts: Sequence[Callable[[], Any]] = (),
        known: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self._read, self._read_numbers, self._outermost, self._known = read, numbers, dicts or (read,), known
        self._note(*_flattened(read(), known), numbers())

    def has_changed(self) -> bool:
        """Whether values have changed since the last call."""
        if self._has_same_items():
            return False
        numbers, before = self._read_numbers(), self._before
        found, containers = _flattened(self._read(), self._known)
        is_same = numbers == self._numbers and len(found) == len(before) and all(map(_is_same, before, found))
        self._note(found, containers, numbers)
        return not is_same

    def _note(self, found: list[Any], containers: list[Any], numbers: list[int]) -> None:
        self._numbers = numbers
        self._before = [*map(_reference, found)]
        self.containers = {id(each): each for each in containers}
        lists = [each for each in containers if kind_of(each) is ValueKind.CONTAINER]
        self._lists = [each for each in lists if len(each) <= MOST]
        self._long = [each for each in lists if len(each) > MOST]
        self._values = [each.values() for each in self._lists if isinstance(each, dict)]
        objects = [each for each in containers if kind_of(each) is not ValueKind.CONTAINER]
        self._reads = [*self._outermost, *filter(None, map(_reader, objects))]
        self._items = self._items_now()
        known = [*zip(found, self._before, strict=True)]
        tensors = [reference for x, reference in known if isinstance(x, Tensor)]
        self._tensors, self._versions = [each for each, _ in tensors], [version for _, version in tensors]
        self._generators = [reference for x, reference in known if kind_of(x) is ValueKind.GENERATOR]
        self._copied = [reference for x, reference in known if kind_of(x) is ValueKind.COPIED]

    def _items_now(self) -> list[int]:
        """The numbers of the items of all lists, dicts and objects, and the identities of the items, and of keys."""
        read = [each() for each in self._reads]
        values = [each.values() for each in read if isinstance(each, dict)]
        items = itertools.chain(*self._lists, *self._values, *read, *values)
        return [*map(len, self._long), *map(len, self._lists), *map(len, read), *map(id, items)]

    def _has_same_items(self) -> bool:
        if self._items_now() != self._items:
            return False
        tensors = [reference() for reference in self._tensors]
        if tensors and (any(x is None for x in tensors) or _versions(tensors) != self._versions):
            return False
        return all(state_of(x) == state for x, state in self._generators) and all(
            contents_of(x) == contents for x, contents in self._copied
        )


_PLAIN = Tensor, nn.Parameter, FakeTensor


def unwatched_version(x: Tensor) -> int:
    """The version of a tensor. A mode for torch's functions is not asked for that of a plain one."""
    if type(x) not in _PLAIN:
        return x._version
    with torch._C.DisableTorchFunction():
        return x._version


def _versions(tensors: list[Tensor]) -> list[int]:
    """The versions of tensors, as of `unwatched_version`, in less time than one by one."""
    if not all(type(x) in _PLAIN for x in tensors):
        return [*map(unwatched_version, tensors)]
    with torch._C.DisableTorchFunction():
        return [x._version for x in tensors]


def _reader(value: Any) -> Callable[[], Any] | None:
    """Returns the items of a list or dict, or the attributes of an object; None for other values."""
    kind = kind_of(value)
    if kind is ValueKind.CONTAINER:
        return lambda: value
    return attribute_place("", value).read if kind is ValueKind.OBJECT and not isinstance(value, nn.Module) else None


def _flattened(values: list[Any], known: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """Values, and the items of lists, dicts and objects at any depth, but not of modules, of objects of libraries, and
    of those that are known; and these lists, dicts and objects."""
    waiting, seen, found, containers = values, set[int](), list[Any](), list[Any]()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, tuple):
            found.append(value)
        if id(value) in seen or id(value) in known or (reader := _reader(value)) is None:
            continue
        seen.add(id(value))
        containers.append(value)
        items = reader()
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
