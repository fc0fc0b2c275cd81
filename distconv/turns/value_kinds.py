"""The kinds of values that a program keeps, by their classes: how parts, and a followed call, treat each."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import functools
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distconv.tensors.user_lines import is_programs_class


class ValueKind(Enum):
    """How values of a class are treated."""

    SHARED, CONTAINER, TENSOR, OBJECT, FUNCTION, METHOD, PARTIAL, GENERATOR, CLASS, COPIED, NAMESPACE = range(11)
    REFERENCE = 11  # A weak one.
    OF_THREAD = 12  # Every thread has values of its own.


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
    ValueKind.OBJECT: (
        *(queue.Queue, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap),
        *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, torch.quasirandom.SobolEngine),
    ),
    ValueKind.REFERENCE: weakref.ref,
    ValueKind.FUNCTION: types.FunctionType,
    ValueKind.METHOD: (types.MethodType, types.BuiltinMethodType),
    ValueKind.PARTIAL: functools.partial,
    ValueKind.CLASS: type,
    ValueKind.OF_THREAD: (contextvars.ContextVar, threading.local),
    ValueKind.SHARED: (types.ModuleType, BaseException),
}


IN_PLACE = (ValueKind.CONTAINER, ValueKind.TENSOR, ValueKind.COPIED)
"""Kinds of values that change in place, and of which parts have copies."""

CODE = (ValueKind.FUNCTION, ValueKind.METHOD, ValueKind.PARTIAL, ValueKind.CLASS)
"""Kinds of values that are called."""


def keeps_identity(container: Any) -> bool:
    """Whether parts have no copies of a list, dict, set or deque, but exchange its items: it has attributes, too."""
    attributes = None if isinstance(container, tuple) else getattr(container, "__dict__", None)
    return attributes is not None and (bool(attributes) or is_programs_class(type(container)))


def is_state(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a value, and not a method, a member of an enumeration or the like."""
    if name.startswith("__") or isinstance(value, Enum):
        return False
    return value is None or isinstance(value, bool | int | float | str) or kind_of(value) in IN_PLACE


def is_state_of_enum(name: str, value: Any) -> bool:
    """As `is_state`, of a class of enumerated members: its tables of these stay."""
    return not (name.startswith("_") and name.endswith("_")) and is_state(name, value)
