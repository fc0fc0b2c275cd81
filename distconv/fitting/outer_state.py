"""What functions of modules may read outside of these: objects, global variables, attributes of classes, lists, arrays.

A segment that backward computes again reads there what it read at first, whatever the program has changed since.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from distconv.turns.copies import fill_container
from distconv.turns.places_of_state import Attributes, StatePlace, Values, attribute_place
from distconv.turns.reach import MOST_BYTES, Reach, hooks_of_all_modules, is_constant
from distconv.turns.value_kinds import ValueKind, kind_of

_OF_MODULES = "_parameters", "_modules", "forward"
"""Attributes of modules that stay as they are."""


class _Kept(NamedTuple):
    """A value that may change: how it is read, compared with one that was read before, and written."""

    before: Any
    read: Callable[[], Any]
    is_same: Callable[[Any, Any], bool]
    write: Callable[[Any], None]


class OuterState:
    """The values that functions of some modules may read outside of these, as they are now. Parameters do not count,
    nor large tensors and arrays, nor what iterators have."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._kept: list[_Kept] = []
        self._seen: dict[int, Any] = {}
        inner = [each for module in modules for each in module.modules()]
        if not hooks_of_all_modules() and not any(map(_may_read_outside, inner)):
            return
        self._seen.update((id(x), x) for each in inner for x in (each, *each._buffers.values()))
        for module in modules:
            reach = Reach(module)
            objects = [(name, x) for name, x in reach.objects if not isinstance(x, queue.Queue)]
            for place in (
                *(attribute_place(name, x) for name, x in objects if not self._has(x)),
                *reach.places,
                *reach.read,
            ):
                self._keep_place(place)

    def _has(self, value: Any) -> bool:
        """Whether a value is known; from now on it is."""
        known = id(value) in self._seen
        self._seen[id(value)] = value
        return known

    def _keep_place(self, place: StatePlace) -> None:
        def read() -> Values:
            return {name: x for name, x in place.read().items() if not _stays(name)}

        def write(values: Values) -> None:
            if not isinstance(place, Attributes):
                place.write(values)
                return
            own = place.read()
            for name in [name for name in own if not _stays(name) and name not in values]:
                del own[name]
            own.update(values)

        values = read()
        self._kept.append(_Kept(values, read, _has_same_items, write))
        for value in values.values():
            self._keep(value)

    def _keep(self, value: Any) -> None:
        kind = kind_of(value)
        if kind not in (ValueKind.CONTAINER, ValueKind.TENSOR, ValueKind.COPIED) or self._has(value):
            return
        if kind is ValueKind.CONTAINER:
            if not isinstance(value, tuple):
                copied: Any = dict if isinstance(value, dict) else list
                self._kept.append(_Kept(copied(value), lambda: copied(value), _has_same_items, _filling(value)))
            for item in value.values() if isinstance(value, dict) else value:
                self._keep(item)
        elif type(value) is Tensor and value.layout is torch.strided and not is_constant(value):
            self._kept.append(_Kept(_numbers(value), lambda: _numbers(value), _have_same_numbers, _writing(value)))
        elif isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.flags.writeable:
            self._kept.append(_Kept(value.copy(), value.copy, _are_equal, lambda own: value.__setitem__(..., own)))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the values are those of the beginning."""
        now = [(each, each.read()) for each in self._kept]
        changed = [(each, value) for each, value in now if not each.is_same(each.before, value)]
        for each, _ in changed:
            each.write(each.before)
        try:
            yield
        finally:
            for each, value in changed:
                each.write(value)


def _may_read_outside(module: nn.Module) -> bool:
    """Whether a module has functions of the program: its class is none of torch's layers, or it has hooks."""
    own = vars(module)
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own
    return bool(hooks) or not type(module).__module__.startswith("torch.nn.modules.")


def _stays(name: Any) -> bool:
    return name in _OF_MODULES or (isinstance(name, str) and "_hooks" in name)


def _has_same_items(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return list(before) == list(now) and all(x is now[name] for name, x in before.items())
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _are_equal(before: Any, now: Any) -> bool:
    return before.tobytes() == now.tobytes()


def _filling(container: Any) -> Callable[[Any], None]:
    return lambda items: fill_container(container, items, lambda item: item)


def _have_same_numbers(before: Tensor, now: Tensor) -> bool:
    """False also where only a wait for the device of a GPU would tell: the numbers are then written in any case.

    The version of a tensor does not tell either: what a program writes through `.data` or a NumPy array of the same
    memory does not raise it. Numbers in the processor's memory are compared, since that may be read-only.
    """
    return is_at_hand(now) and torch.equal(before, now)


def is_at_hand(x: Tensor) -> bool:
    """Whether numbers of a tensor are read without a wait for its device."""
    return x.is_cpu


def _numbers(x: Tensor) -> Tensor:
    with _disable_current_modes(), torch.no_grad():
        return x.detach().clone()


def _writing(x: Tensor) -> Callable[[Tensor], None]:
    def write(numbers: Tensor) -> None:
        with _disable_current_modes(), torch.inference_mode(x.is_inference()), torch.no_grad():
            x.data.copy_(numbers)

    return write
