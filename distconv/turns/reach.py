"""Finds all values that a call of a model may read and change, by references from its modules and arguments.

These are attributes of modules and of other objects, the variables of hooks and of the functions that these call,
globals included, and items of lists and dicts. Objects of Python's library, of torch and of NumPy are not searched.
"""

from __future__ import annotations

import os
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from distconv.tensors.user_lines import is_programs, is_programs_class, is_programs_module
from distconv.turns.code_names import names_of
from distconv.turns.places_of_state import (
    ClassAttributes,
    ClosureVariable,
    Environment,
    GlobalVariable,
    Items,
    Slots,
    StatePlace,
    attribute_place,
    thread_place,
)
from distconv.turns.value_kinds import CODE, IN_PLACE, ValueKind, is_state, is_state_of_enum, keeps_identity, kind_of

MOST = 200_000  # The most values that are looked at in one call.

CONSTANT = 1 << 16  # Parts share a tensor of more bytes until one of them changes it.

MOST_BYTES = 1 << 20  # Parts share arrays of NumPy of more bytes, such as data sets.


_HOOKS = [x for name, x in vars(torch.nn.modules.module).items() if name.startswith("_global") and "_hooks" in name]


def hooks_of_all_modules() -> list[Any]:
    """The functions of `torch.nn.modules.module.register_module_forward_hook`, and of the others of its kind."""
    return [hook for of_kind in _HOOKS if isinstance(of_kind, dict) for hook in of_kind.values()]


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
        read: global variables that these functions read and do not write, other than functions, classes and modules.
        generators: of random numbers.
        differentiable: tensors besides parameters that require gradients.
        constant: tensors besides parameters that parts share, with their names.
        large: arrays that parts share, with their names.
    """

    def __init__(self, module: nn.Module, given: Any = (), functions: Sequence[Any] = ()) -> None:
        """``given``: the arguments of the call, of which only objects count. ``functions``: others that it may call."""
        self.objects: list[tuple[str, Any]] = []
        self.parameters: list[tuple[str, Tensor]] = []
        self.places: list[StatePlace] = []
        self.read: list[StatePlace] = []
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
        self._waiting += [("a hook of all modules", hook, True) for hook in (*hooks_of_all_modules(), *functions)]
        while self._waiting and self._left > 0:
            self._waiting.extend(self._found(*self._waiting.popleft()))

    def others(self, module: nn.Module) -> list[Tensor]:
        """The trained parameters that are none of the module's: of modules in lists, of closures, and the like."""
        own = {id(x) for x in module.parameters()}
        return [x for _, x in self.parameters if type(x) is nn.Parameter and x.requires_grad and id(x) not in own]

    def forget(self, gone: Collection[int]) -> None:
        """Drops tensors, by their ids, that are reached no more."""
        self.constant = [(name, x) for name, x in self.constant if id(x) not in gone]
        for key in gone:
            self._seen.pop(key, None)

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
            if hasattr(value, "__dict__") and (slots := Slots(name, value)).names:
                self.places.append(slots)
                yield from ((f"{name}.{own}", item, False) for own, item in slots.read().items())
        elif kind is ValueKind.CONTAINER:
            is_kept = keeps_identity(value)
            if (is_fixed or is_kept) and not isinstance(value, tuple):
                self.places.append(Items(name, value))
            if is_kept and vars(value) is not value:
                self.objects.append((name, value))
                yield from self._within(name, value)
            for item in list(value.values()) if isinstance(value, dict) else list(value):
                if kind_of(item) is not ValueKind.SHARED:
                    yield name, item, is_fixed and isinstance(value, tuple)
            for key in list(value) if isinstance(value, dict) else ():
                if kind_of(key) in (ValueKind.OBJECT, ValueKind.REFERENCE):
                    yield name, key, True
        elif kind is ValueKind.GENERATOR:
            self.generators.append(value)
        elif kind is ValueKind.NAMESPACE:
            yield name, vars(value), True
        elif kind is ValueKind.OF_THREAD:
            place = thread_place(name, value)
            self.places.append(place)
            yield from ((f"{name}.{own}".rstrip("."), item, False) for own, item in place.read().items())
        elif kind is ValueKind.REFERENCE:
            yield name, value(), True
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
                or (kind is ValueKind.CONTAINER and not item and not keeps_identity(item))
                or own in ("_modules", "_parameters")
            ):
                continue
            yield f"{name}.{own}", item, False
        yield from self._of_class(type(value))

    def _of_class(self, kind: type) -> Iterator[tuple[str, Any, bool]]:
        """The values of a class and of its own class, and their functions."""
        for cls in (*kind.__mro__, *type.mro(type(kind))):
            if id(cls) not in self._seen and is_programs_class(cls):
                self._seen[id(cls)] = cls
                members = getattr(cls, "__members__", {}) if issubclass(cls, Enum) else {}
                self.places.append(ClassAttributes(cls, is_state_of_enum if members else is_state))
                for own, item in (*vars(cls).items(), *members.items()):
                    each = (item.fget, item.fset, item.fdel) if isinstance(item, property) else (item,)
                    for function in each:
                        yield f"{cls.__name__}.{own}", getattr(function, "__func__", function), False

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
        names, of_all = names_of(function.__code__), function.__globals__
        if "environ" in (*names.read, *names.attributes) and not self._has(os.environ):
            self._seen[id(os.environ)] = os.environ
            self.places.append(Environment())
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        used = [*map(of_all.get, names.read), *cells]
        changed = [function] if vars(function) else []
        changed += [x for x in used if isinstance(x, types.FunctionType)] if names.assigned else []
        for each in changed:
            if (id(each), "attributes") not in self._seen and is_programs(each.__code__.co_filename):
                self._seen[id(each), "attributes"] = each
                self.objects.append((each.__name__, each))
                yield from ((f"{each.__name__}.{own}", item, False) for own, item in vars(each).items())
        yield from self._of_variables(of_all, (*names.read, *names.written), names.written)
        for name in names.written:
            if name not in of_all and (id(of_all), name, "place") not in self._seen:  # it may be set in the call
                self._seen[id(of_all), name, "place"] = of_all
                self.places.append(GlobalVariable(of_all, name))
        waiting = [*used, *map(sys.modules.get, names.imported)]
        if "modules" in names.attributes:  # of `sys`
            waiting.append(sys.modules.get(function.__module__))
        seen = set()
        while waiting:
            module = waiting.pop()
            if isinstance(module, types.ModuleType) and id(module) not in seen and is_programs_module(module):
                seen.add(id(module))
                waiting += map(vars(module).get, names.attributes)
                yield from self._of_variables(vars(module), names.attributes, names.assigned)

    def _of_variables(
        self, of_all: dict[str, Any], names: Sequence[str], written: Sequence[str]
    ) -> Iterator[tuple[str, Any, bool]]:
        """The values of some variables of a module, some of which are written; one function may read what another
        one writes."""
        for name in names:
            if name not in of_all:
                continue
            value, key = of_all[name], (id(of_all), name)
            is_place = name in written or kind_of(value) in IN_PLACE
            if is_place and (*key, "place") not in self._seen:
                self._seen[*key, "place"] = of_all
                self.places.append(GlobalVariable(of_all, name))
            if key not in self._seen:
                self._seen[key] = of_all
                if not is_place and kind_of(value) not in CODE and not isinstance(value, types.ModuleType):
                    self.read.append(GlobalVariable(of_all, name))
                yield name, value, False
