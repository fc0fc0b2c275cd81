"""The places where a program keeps values: attributes, globals, closures. Their values are exchanged with each part."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol

Values = dict[Any, Any]


class StatePlace(Protocol):
    """Some values of the program, by names. ``name``: for errors."""

    name: str

    def read(self) -> Values:
        """The values that are in place."""

    def write(self, values: Values) -> None:
        """Puts other values in place, under their names alone."""


class Attributes:
    """The attributes of an object with a ``__dict__``, which itself is exchanged."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.object = name, value

    def read(self) -> Values:
        found: Values = self.object.__dict__
        return found

    def write(self, values: Values) -> None:
        object.__setattr__(self.object, "__dict__", values)


class Slots:
    """The attributes of an object whose class has ``__slots__``."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._object = name, value
        slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
        names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        self.names = [name for name in names if name not in ("__dict__", "__weakref__")]

    def read(self) -> Values:
        return {name: getattr(self._object, name) for name in self.names if hasattr(self._object, name)}

    def write(self, values: Values) -> None:
        for name in self.names:
            if name in values:
                object.__setattr__(self._object, name, values[name])
            elif hasattr(self._object, name):
                object.__delattr__(self._object, name)


def attribute_place(name: str, value: Any) -> Attributes | Slots:
    """The place of the attributes of an object."""
    return Attributes(name, value) if hasattr(value, "__dict__") else Slots(name, value)


class ClosureVariable:
    """A variable of a function that functions within it use."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        self.name, self._cell = name, cell

    def read(self) -> Values:
        try:
            return {"": self._cell.cell_contents}
        except ValueError:  # it has no value yet
            return {}

    def write(self, values: Values) -> None:
        if values:
            self._cell.cell_contents = values[""]
        else:
            with contextlib.suppress(ValueError):
                del self._cell.cell_contents


class GlobalVariable:
    """A global variable."""

    def __init__(self, of_all: dict[str, Any], name: str) -> None:
        self.name, self._of_all = name, of_all

    def read(self) -> Values:
        return {"": self._of_all[self.name]} if self.name in self._of_all else {}

    def write(self, values: Values) -> None:
        if values:
            self._of_all[self.name] = values[""]
        else:
            self._of_all.pop(self.name, None)


class ThreadAttributes:
    """The attributes of a `threading.local`, as this thread has them."""

    def __init__(self, name: str, value: threading.local) -> None:
        self.name, self._object = name, value

    def read(self) -> Values:
        return dict(vars(self._object))

    def write(self, values: Values) -> None:
        own = vars(self._object)
        own.clear()
        own.update(values)


class ContextVariable:
    """A context variable of Python. One without a value cannot be told from one that has its default."""

    def __init__(self, name: str, variable: contextvars.ContextVar[Any]) -> None:
        self.name, self._variable = name, variable

    def read(self) -> Values:
        try:
            return {"": self._variable.get()}
        except LookupError:
            return {}

    def write(self, values: Values) -> None:
        if values and self._variable.get(self) is not values[""]:
            self._variable.set(values[""])


OF_THREAD = ThreadAttributes, ContextVariable
"""Places in which every thread has values of its own."""


def thread_place(name: str, value: Any) -> ThreadAttributes | ContextVariable:
    """The place of the values that this thread has."""
    is_variable = isinstance(value, contextvars.ContextVar)
    return ContextVariable(name, value) if is_variable else ThreadAttributes(name, value)


class Environment:
    """The environment variables of the process."""

    name = "os.environ"

    def read(self) -> Values:
        return {name: sys.intern(value) for name, value in os.environ.items()}

    def write(self, values: Values) -> None:
        now = self.read()
        for name in now.keys() - values.keys():
            del os.environ[name]
        for name, value in values.items():
            if now.get(name) != value:
                os.environ[name] = value


class ClassAttributes:
    """The attributes of a class that are values: ``is_state`` says of a name and its value whether it is one."""

    def __init__(self, cls: type, is_state: Callable[[str, Any], bool]) -> None:
        self.name, self._class, self._is_state = cls.__name__, cls, is_state
        self._names: dict[str, None] = {}
        self._count = 0  # The attributes of the class, among which the names were looked for.

    def read(self) -> Values:
        own = vars(self._class)
        if len(own) != self._count:
            self._names.update((name, None) for name, value in own.items() if self._is_state(name, value))
            self._count = len(own)
        return {name: own[name] for name in self._names if name in own}

    def write(self, values: Values) -> None:
        own = vars(self._class)
        for name in [*self.read()]:
            if name not in values:
                delattr(self._class, name)
        for name, value in values.items():
            if own.get(name) is not value:  # Python forgets what it knows of a class that is changed
                setattr(self._class, name, value)


class Items:
    """The items of a list or dict that stays the same object."""

    def __init__(self, name: str, container: Any) -> None:
        self.name, self._container = name, container
        self._kind: Any = next(kind for kind in (OrderedDict, dict, set, list, deque) if isinstance(container, kind))
        """Its class in Python's library, whose methods no class of the program has replaced."""

    def read(self) -> Values:
        own = self._container
        return dict(own) if isinstance(own, dict) else dict(enumerate(own))

    def write(self, values: Values) -> None:
        own, kind = self._container, self._kind
        kind.clear(own)
        if kind in (dict, set):
            kind.update(own, values if kind is dict else values.values())
        elif kind is OrderedDict:
            for name, value in values.items():
                kind.__setitem__(own, name, value)
        else:
            kind.extend(own, values.values())


@functools.lru_cache(maxsize=4096)
def dict_setter(cls: Any) -> Callable[[Any, Values], None]:
    """The function that gives an object of a class another ``__dict__``, without a look-up by name each time.

    It is taken from the last base, so that it still fits if the object gets another class with the same base.
    """
    dicts = (vars(each)["__dict__"] for each in reversed(cls.__mro__) if "__dict__" in vars(each))
    found: Callable[[Any, Values], None] = next(dicts).__set__
    return found
