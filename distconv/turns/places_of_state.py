"""The places where a program keeps values: attributes, globals, closures. Their values are exchanged with each part."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
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
        self._names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]

    def read(self) -> Values:
        return {name: getattr(self._object, name) for name in self._names if hasattr(self._object, name)}

    def write(self, values: Values) -> None:
        for name in self._names:
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


class ClassAttributes:
    """Some attributes of a class."""

    def __init__(self, cls: type, names: Sequence[str]) -> None:
        self.name, self._class, self._names = cls.__name__, cls, names

    def read(self) -> Values:
        own = vars(self._class)
        return {name: own[name] for name in self._names if name in own}

    def write(self, values: Values) -> None:
        own = vars(self._class)
        for name, value in values.items():
            if own.get(name) is not value:  # Python forgets what it knows of a class that is changed
                setattr(self._class, name, value)


class Items:
    """The items of a list or dict that stays the same object."""

    def __init__(self, name: str, container: Any) -> None:
        self.name, self._container = name, container

    def read(self) -> Values:
        own = self._container
        return dict(own) if isinstance(own, dict) else dict(enumerate(own))

    def write(self, values: Values) -> None:
        own = self._container
        own.clear()
        if isinstance(own, dict | set):
            own.update(values if isinstance(own, dict) else values.values())
        else:
            own.extend(values.values())
