"""Copies of the caller's lists, dicts and tensors, so that each part of a call in turn changes its own.

A call of a large model takes tens of thousands of dicts and sets, so empty ones of calls that are over are used again
(`Spare`). To make so many anew would set off Python's garbage collection of all objects of the process, every few
calls.
"""

from __future__ import annotations

import copy
import operator
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from distconv.tensors.read_parts import note_copy, with_data
from distconv.tensors.refusal import UnsupportedOperation
from distconv.turns.reach import MOST_BYTES
from distconv.turns.value_kinds import ValueKind, keeps_identity, kind_of


class Copies:
    """The copies that one part has: of containers, and in all parts but the first of tensors.

    Attributes:
        known: the part's copy, by the id of the caller's container or tensor.
        originals: the caller's container, by the id of the part's copy.
        entered: the caller's tensor that requires gradients, by the id of the part's replica.
    """

    def __init__(
        self, part: int, is_shared: Callable[[Tensor], bool], enter: Callable[[int, Tensor], Tensor], spare: Spare
    ) -> None:
        self.part, self._is_shared, self._enter, self._spare = part, is_shared, enter, spare
        self.originals: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        """The copied containers of earlier runs of the same call, by the id of the original."""
        self._kept: list[Any] = []  # Originals and copies, so that no id occurs again.
        self.known: dict[int, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Copies all contents anew: into the same containers and, after the first run, into the same tensors."""
        self.entered: dict[int, Tensor] = {}
        self._before, self.known = self.known, {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._memory: dict[tuple[int, int], Any] = {}  # Copied memory of arrays, by its address and size.

    def forget(self, gone: Collection[int]) -> None:
        """Drops tensors of the caller, by their ids, and the copies of them."""
        self._kept = [x for x in self._kept if id(x) not in gone]
        self.known = {key: x for key, x in self.known.items() if key not in gone}

    def of(self, value: Any) -> Any:
        """The copy of a value, or the value itself where parts share it."""
        kind = kind_of(value)
        if kind is ValueKind.CONTAINER:
            if keeps_identity(value):
                return value
            found = self.known.get(id(value))
            return self._container(value) if found is None else found
        if kind is ValueKind.TENSOR and not isinstance(value, nn.Parameter):
            found = self.known.get(id(value))
            return self._tensor(value) if found is None else found
        if kind is ValueKind.COPIED and self.part > 0 and getattr(value, "nbytes", 0) <= MOST_BYTES:
            if id(value) not in self.known:
                self._kept.append(value)
                self.known[id(value)] = self._array(value) if type(value) is np.ndarray else _copy(value)
            return self.known[id(value)]
        return value

    def _array(self, value: Any) -> Any:
        """A copy of an array. Copies of views of one memory are views of one copy."""
        root = value
        while type(root.base) is np.ndarray:
            root = root.base
        flat = root.ravel(order="K")
        if root.nbytes > MOST_BYTES or root.dtype.hasobject or not np.may_share_memory(flat, root):
            return value.copy(order="K")
        key = root.ctypes.data, root.nbytes
        if key not in self._memory:
            self._memory[key] = flat.copy()
        offset = value.ctypes.data - flat.ctypes.data
        return np.ndarray(value.shape, value.dtype, self._memory[key], offset, value.strides)

    def _tensor(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            raise UnsupportedOperation(
                f"parts in turn: the model keeps a distributed tensor {tuple(value.shape)}, which the program has made"
                " of a parameter that is sharded along all axes; accepted: without --shard-parameters"
            )
        self._kept.append(value)
        if value.requires_grad and torch.is_grad_enabled():
            made = self.known[id(value)] = self._enter(self.part, value)
            self.entered[id(made)] = value
            return made
        if self.part == 0 or self._is_shared(value):
            self.known[id(value)] = value
            return value
        made = value.detach()
        if isinstance(value, FakeTensor) or value.layout is not torch.strided:
            made = made.clone()
        else:
            storage = value.untyped_storage()
            found = self._storages.get(storage._cdata)
            if found is None and storage.nbytes() == value.nbytes:
                made = made.clone(memory_format=torch.preserve_format)
                self._storages[storage._cdata] = made.untyped_storage()
            else:  # a view, which sees what is written to the others of its memory
                found = self._storages[storage._cdata] = storage.clone() if found is None else found
                made = made.new_empty(0).set_(found, value.storage_offset(), value.size(), value.stride())
        if not isinstance(value, FakeTensor):
            before = self._before.get(id(value))
            if type(before) is Tensor and before is not value:  # the copy of forward, which its graph may have saved
                made = with_data(before, made)
            else:
                note_copy(value, made, self.part)
        self.known[id(value)] = made
        self._copy_attributes(value, made)
        return made

    def _copy_attributes(self, value: Tensor, made: Tensor) -> None:
        """Gives a copy of a tensor the attributes that the program has set, a part's own."""
        if not isinstance(value, FakeTensor) and (vars(value) or vars(made)):
            own = {name: self.of(x) for name, x in vars(value).items() if not name.startswith("_distconv")}
            kept = {name: x for name, x in vars(made).items() if name.startswith("_distconv")}
            made.__dict__ = {**own, **kept}

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            made: Any = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        else:
            made = self._made.get(id(value))
            if made is None:
                kind = type(value)
                made = self._made[id(value)] = self._spare.empty(kind) if kind in KINDS else copy.copy(value)
            self.known[id(value)] = made
            fill_container(made, value, self.of)
        self.known[id(value)] = made
        self.originals[id(made)] = value
        self._kept += [value, made]
        return made


def fill_container(made: Any, value: Any, copied: Callable[[Any], Any]) -> None:
    """Replaces the items of ``made`` by copies of those of ``value``. Where they are the same, nothing is written, as
    other threads may read them."""
    keys = list(value) if isinstance(value, dict) else []
    names = [copied(key) if isinstance(key, Tensor) else key for key in keys]  # by identity a key, too
    items = [copied(item) for item in (value.values() if isinstance(value, dict) else value)]
    if _has(made, names) and _has(made.values(), items) if isinstance(value, dict) else _has(made, items):
        return
    if not (isinstance(value, dict) and _has(made, names)):
        made.clear()
    if isinstance(value, dict):
        for name, item in zip(names, items, strict=True):
            made[name] = item
    elif isinstance(made, set):
        made.update(items)
    else:
        made.extend(items)


def _has(found: Collection[Any], items: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(found) == len(items) and all(map(operator.is_, found, items))


def _copy(value: Any) -> Any:
    return iterator_copy(value) if hasattr(value, "__next__") else copy.copy(value)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, of which parts have copies."""
    return kind_of(value) is ValueKind.COPIED and hasattr(value, "__next__")


def iterator_copy(value: Any) -> Any:
    """An independent copy of an iterator; for one that cannot be copied, an iterator that raises an error."""
    try:
        if type(value).__module__ not in ("builtins", "itertools"):
            raise TypeError
        with warnings.catch_warnings(action="ignore"):
            make, given, *state = value.__reduce__()
            made = make(*map(_of_iterator, given))
            if state:
                made.__setstate__(_of_iterator(state[0]))
            return made
    except TypeError:  # a generator, or an iterator of itertools from Python 3.14 on
        return _refusing(type(value).__name__)


def _of_iterator(value: Any) -> Any:
    """A copy of an iterator's state: of other iterators in it, and of the items that `itertools.cycle` has seen."""
    if type(value) is tuple:
        return tuple(list(item) if type(item) is list else _of_iterator(item) for item in value)
    return iterator_copy(value) if hasattr(value, "__next__") else value


def _refusing(name: str) -> Iterator[None]:
    raise UnsupportedOperation(
        f"parts in turn: the next item of a {name} that is kept from before the call, which would go on once for each"
        " part; accepted: iterators of lists and those of itertools"
    )
    yield


_spare: dict[type, list[Any]] = {dict: [], set: [], OrderedDict: []}
_left: list[list[Any]] = []
"""The containers of owners that are gone. Whether something else refers to them has not been checked yet."""

KINDS = frozenset(_spare)


class Spare:
    """Gives an owner empty containers of `KINDS`. Once the owner is gone, those without other references are reused."""

    def __init__(self, owner: object) -> None:
        self._taken: list[Any] = []
        weakref.finalize(owner, _left.append, self._taken).atexit = False
        _collect()

    def empty(self, kind: type) -> Any:
        """An empty container of a kind."""
        try:
            made = _spare[kind].pop()
        except IndexError:  # also where another thread has taken the last one
            made = kind()
        self._taken.append(made)
        return made

    def copy(self, given: dict[Any, Any]) -> dict[Any, Any]:
        """A dict of the same items."""
        made: dict[Any, Any] = self.empty(dict)
        made.update(given)
        return made


def _collect() -> None:
    while _left:
        try:
            taken = _left.pop()
        except IndexError:
            return
        taken.reverse()  # what contains others was taken before them
        while taken:
            each = taken.pop()
            if sys.getrefcount(each) == _OWN:
                each.clear()
                _spare[type(each)].append(each)


def _references() -> int:
    """The result of `sys.getrefcount` for an object to which a local variable alone refers."""
    each = object()
    return sys.getrefcount(each)


_OWN = _references()
