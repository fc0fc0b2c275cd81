"""Finds all values that a call of a model may read and change, by references from its modules and arguments.

These are attributes of modules and of other objects, the variables of hooks and of the functions that these call,
globals included, and items of lists and dicts. Objects of Python's library, of torch and of NumPy are not searched.
"""

from __future__ import annotations

import argparse
import array
import collections
import dis
import functools
import queue
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from distconv.tensors.user_lines import is_programs
from distconv.turns.places_of_state import (
    ClassAttributes,
    ClosureVariable,
    GlobalVariable,
    Items,
    StatePlace,
    attribute_place,
)

MOST = 200_000  # The most values that are looked at in one call.

CONSTANT = 1 << 16  # Parts share a tensor of more bytes until one of them changes it.

MOST_BYTES = 1 << 20  # Parts share arrays of NumPy of more bytes, such as data sets.


class ValueKind(Enum):
    """How values of a class are treated."""

    SHARED, CONTAINER, TENSOR, OBJECT, FUNCTION, METHOD, PARTIAL, GENERATOR, CLASS, COPIED, NAMESPACE = range(11)


FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "distconv", "mucudnn"})
"""Packages whose objects are not looked into."""


def kind_of(value: Any) -> ValueKind:
    """The kind of a value."""
    cls: Any = type(value)
    return _kind(cls)


@functools.lru_cache(maxsize=4096)
def _kind(cls: Any) -> ValueKind:
    if issubclass(cls, Tensor):
        return ValueKind.TENSOR
    if issubclass(cls, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return ValueKind.OBJECT
    if issubclass(cls, list | dict | set | deque | tuple) and not hasattr(cls, "n_sequence_fields"):
        return ValueKind.CONTAINER
    if issubclass(cls, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
        return ValueKind.SHARED if issubclass(cls, random.SystemRandom) else ValueKind.GENERATOR
    if issubclass(cls, np.ndarray | bytearray | array.array):
        return ValueKind.COPIED
    for kind, classes in _OF_PYTHON.items():
        if issubclass(cls, classes):
            return kind
    if not (cls.__dictoffset__ or hasattr(cls, "__slots__")) or cls.__module__.partition(".")[0] in FOREIGN:
        return ValueKind.COPIED if hasattr(cls, "__next__") and not hasattr(cls, "readline") else ValueKind.SHARED
    return ValueKind.OBJECT


_OF_PYTHON: dict[ValueKind, Any] = {
    ValueKind.NAMESPACE: types.SimpleNamespace,
    ValueKind.OBJECT: (queue.Queue, argparse.Namespace, collections.UserDict, collections.UserList),
    ValueKind.FUNCTION: types.FunctionType,
    ValueKind.METHOD: (types.MethodType, types.BuiltinMethodType),
    ValueKind.PARTIAL: functools.partial,
    ValueKind.CLASS: type,
    ValueKind.SHARED: (types.ModuleType, Enum, BaseException, threading.local),
}


IN_PLACE = (ValueKind.CONTAINER, ValueKind.TENSOR, ValueKind.COPIED)
"""Kinds of values that change in place, and of which parts have copies."""


def is_constant(x: Tensor) -> bool:
    """Whether parts share a tensor until one of them changes it: a large one, such as a grid of coordinates."""
    is_plain = type(x) in (Tensor, FakeTensor) and x.layout is torch.strided
    return is_plain and x.nbytes > CONSTANT and not x.requires_grad


class Reach:
    """The values that are reached from a module.

    Attributes:
        objects: those with attributes, with their names; modules come first.
        parameters: all parameters, with their names.
        places: the other places of values, such as globals.
        generators: of random numbers.
        differentiable: tensors besides parameters that require gradients.
        constant: tensors besides parameters that parts share, with their names.
        large: arrays that parts share, with their names.
    """

    def __init__(self, module: nn.Module, given: Any = ()) -> None:
        """``given``: the arguments of the call, of which only objects count."""
        self.objects: list[tuple[str, Any]] = []
        self.parameters: list[tuple[str, Tensor]] = []
        self.places: list[StatePlace] = []
        self.generators: list[Any] = []
        self.differentiable: list[Tensor] = []
        self.constant: list[tuple[str, Tensor]] = []
        self.large: list[tuple[str, Any]] = []
        self._seen: dict[Any, Any] = {}
        self._left = MOST
        self._waiting: deque[tuple[str, Any, bool]] = deque()
        self._add(type(module).__name__, module)
        self._waiting += [("an argument", x, True) for x in tree_leaves(given) if kind_of(x) is ValueKind.OBJECT]
        # The process has one cache of parametrizations: calls of other models, in other threads, leave it alone.
        if any("parametrizations" in each._modules for _, each in self.objects):
            for name, value in (("_cache_enabled", parametrize._cache_enabled), ("_cache", parametrize._cache)):
                self.places.append(GlobalVariable(vars(parametrize), name))
                self._waiting.append((name, value, False))
        while self._waiting and self._left > 0:
            self._waiting.extend(self._found(*self._waiting.popleft()))

    def others(self, module: nn.Module) -> list[Tensor]:
        """The trained parameters that are none of the module's: of modules in lists, of closures, and the like."""
        own = {id(x) for x in module.parameters()}
        return [x for _, x in self.parameters if type(x) is nn.Parameter and x.requires_grad and id(x) not in own]

    def _add(self, name: str, model: nn.Module) -> None:
        """Notes all modules of a model, and their values."""
        found = [(inner or name, each) for inner, each in model.named_modules() if each is model or not self._has(each)]
        self._seen.update((id(each), each) for _, each in found)
        for inner, each in found:
            self.objects.append((inner, each))
            for own, x in each._parameters.items():
                if x is not None and not self._has(x):
                    self._seen[id(x)] = x
                    self.parameters.append((own if each is model else f"{inner}.{own}", x))
            self._waiting.extend(self._within(inner, each))

    def _has(self, value: Any) -> bool:
        return id(value) in self._seen

    def _found(self, name: str, value: Any, is_fixed: bool) -> Iterator[tuple[str, Any, bool]]:
        """Notes a value, and yields those that it refers to. ``is_fixed``: no other value can be put in its place."""
        kind = kind_of(value)
        if kind is ValueKind.SHARED or id(value) in self._seen:
            return
        self._left -= 1
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._add(name, value)
            return
        if kind is ValueKind.TENSOR:
            if isinstance(value, nn.Parameter):
                self.parameters.append((name, value))
            elif value.requires_grad:
                self.differentiable.append(value)
            elif is_constant(value):
                self.constant.append((name, value))
        elif kind is ValueKind.OBJECT:
            self.objects.append((name, value))
            yield from self._within(name, value)
        elif kind is ValueKind.CONTAINER:
            if is_fixed and not isinstance(value, tuple):
                self.places.append(Items(name, value))
            for item in list(value.values()) if isinstance(value, dict) else list(value):
                if kind_of(item) is not ValueKind.SHARED:
                    yield name, item, is_fixed and isinstance(value, tuple)
        elif kind is ValueKind.GENERATOR:
            self.generators.append(value)
        elif kind is ValueKind.NAMESPACE:
            yield name, vars(value), True
        elif kind is ValueKind.COPIED and getattr(value, "nbytes", 0) > MOST_BYTES:
            self.large.append((name, value))
        elif kind is ValueKind.METHOD:
            yield name, value.__self__, True
            yield name, getattr(value, "__func__", None), True
        elif kind is ValueKind.PARTIAL:
            for item in (value.func, *value.args, *value.keywords.values()):
                yield name, item, True
        elif kind is ValueKind.CLASS:
            del self._seen[id(value)]
            yield from self._of_class(value)
        elif kind is ValueKind.FUNCTION:
            yield from self._of_function(value)

    def _within(self, name: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
        """The values of an object, and its class."""
        for own, item in attribute_place(name, value).read().items():
            kind = kind_of(item)
            if (
                kind is ValueKind.SHARED
                or (kind is ValueKind.CONTAINER and not item)
                or own in ("_modules", "_parameters")
            ):
                continue
            yield f"{name}.{own}", item, False
        yield from self._of_class(type(value))

    def _of_class(self, kind: type) -> Iterator[tuple[str, Any, bool]]:
        for cls in kind.__mro__:
            if id(cls) not in self._seen and _is_programs(cls):
                self._seen[id(cls)] = cls
                names = [own for own, item in vars(cls).items() if _is_state(own, item)]
                if names:
                    self.places.append(ClassAttributes(cls, names))
                for own, item in list(vars(cls).items()):
                    yield f"{cls.__name__}.{own}", getattr(item, "__func__", getattr(item, "fget", item)), False

    def _of_function(self, function: Any) -> Iterator[tuple[str, Any, bool]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                place = ClosureVariable(name, cell)
                if place.read():
                    self.places.append(place)
                    yield name, cell.cell_contents, False
        for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield function.__name__, item, True
        if not is_programs(function.__code__.co_filename):
            return
        of_all, key = function.__globals__, id(function.__globals__)
        read, written = _names(function.__code__)
        for name in (*read, *written):
            if name not in of_all or (key, name) in self._seen:
                continue
            self._seen[key, name] = of_all
            value = of_all[name]
            if name in written or kind_of(value) in IN_PLACE:
                self.places.append(GlobalVariable(of_all, name))
            yield name, value, False


def _is_programs(cls: type) -> bool:
    """Whether a class is the program's own."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ != "builtins" and is_programs(getattr(module, "__file__", None) or "")


def _is_state(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a value, and not a method or the like."""
    return not name.startswith("__") and (
        value is None or isinstance(value, bool | int | float | str) or kind_of(value) in IN_PLACE
    )


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The global names that code reads, and those that it writes, functions within it included."""
    read: dict[str, None] = {}
    written: dict[str, None] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read[each.argval] = None
        elif each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written[each.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for names, into in zip(_names(inner), (read, written), strict=True):
                into.update(dict.fromkeys(names))
    return tuple(read), tuple(written)
