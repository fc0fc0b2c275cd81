"""Parameters in use: while a model runs, its parameters change their class, so that functions get activations of them.

They stay the objects that the program's optimizer has. Functions that read or change a parameter itself (its `data`,
its `grad`, in-place functions, hooks) are torch's own, on the parameter. So are functions of parameters and plain
tensors alone, if no gradient is recorded. Every other function is given the parameter's activation, or its DTensor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.activation import Activation, as_dtensors, needs_gradient
from distconv.model.direct.blank import Blank
from distconv.model.direct.paths import LEAVES, is_in_place, running
from distconv.tensors.arguments import each_of

_OF_PARAMETER_ITSELF = (
    *(Tensor.detach, Tensor.detach_, Tensor.register_hook, Tensor.retain_grad, Tensor.is_set_to, torch.is_same_size),
    *(Tensor.register_post_accumulate_grad_hook, Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr),
    *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.element_size, Tensor.__hash__),
    *(Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__len__, Tensor.__format__, Tensor.__repr__),
)
"""Functions that concern a parameter itself, besides its properties and in-place functions."""

_OTHERS = {int, float, bool, str, type(None), Tensor, Activation}
"""Frequent classes of arguments that are no parameters in use, and contain none."""

_RECORDED_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")  # The properties that autograd records.


class InUse:
    """The first base class of a parameter's class while a model runs with it. Made by `_class`."""

    kind: ClassVar[type[Tensor]]  # The class without this one.

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Blank in types:
            return NotImplemented
        kwargs = kwargs or {}
        if running.uses is None or is_own(func, args, kwargs):
            return _on_parameters(func, args, kwargs)
        given, named = running.uses.given(args, kwargs)
        beside = any(_is_distributed(value) for value in (*args, *kwargs.values()))
        if not beside and not (torch.is_grad_enabled() and any(map(_is_recorded, (*given, *named.values())))):
            return _on_parameters(func, args, kwargs)
        result = func(*given, **named)
        return result if beside else _without_layout(result)

    @property
    def data(self) -> Any:
        if running.uses is not None:
            running.uses.given_out.add(id(self))
        with _usual_class([self]):
            return self.data

    @data.setter
    def data(self, value: Tensor) -> None:
        with _usual_class([self]):
            self.data = value
        _renew(self)

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Torch's method, which does not call `__torch_function__`. A sharded parameter accepts only a tensor."""
        if isinstance(self, DTensor) and len(source) == 1 and isinstance(source[0], Tensor):
            self.data = source[0]
            return self
        with _usual_class([self]):
            self.set_(*source, **kwargs)
        _renew(self)
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        with _usual_class([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _usual_class([self]):
            return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        with _usual_class([self]):
            return repr(self)


_classes: set[Any] = set()  # The classes of parameters in use.


@functools.cache
def _class(kind: Any) -> Any:
    made = type(kind.__name__, (InUse, kind), {"kind": kind})
    _classes.add(made)
    return made


def enter(parameter: Tensor) -> None:
    """Makes a parameter one in use."""
    parameter.__class__ = _class(type(parameter))


@contextlib.contextmanager
def in_use(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which parameters are in use. More may be added to a list of them meanwhile."""
    parameters = parameters if isinstance(parameters, list) else list(parameters)
    classes = {kind: _class(kind) for kind in set(map(type, parameters)) if kind not in _classes}
    entered = [x for x in parameters if type(x) in classes]
    known = len(parameters)
    for x in entered:
        x.__class__ = classes[type(x)]
    try:
        yield
    finally:
        for x in (*entered, *parameters[known:]):
            kind = type(x)
            if kind in _classes:
                x.__class__ = kind.kind


@contextlib.contextmanager
def _usual_class(values: Sequence[Any]) -> Iterator[None]:
    """A context in which the parameters in use among some values, and in lists of them, have their usual class."""
    changed: list[Any] = list({id(x): x for x in each_of(InUse, values)}.values())
    for x in changed:
        x.__class__ = x.kind
    try:
        yield
    finally:
        for x in changed:
            if not isinstance(x, InUse):
                enter(x)


def used(args: Sequence[Any], uses: Callable[[Any], Tensor]) -> list[Any]:
    """The arguments of a function, with activations or DTensors in place of parameters in use, in lists too."""
    return [  # called for every function of parameters: as few steps as possible
        arg if (kind := type(arg)) in _OTHERS else uses(arg) if kind in _classes else _used_within(arg, uses)
        for arg in args
    ]


def _used_within(values: Any, uses: Callable[[Any], Tensor]) -> Any:
    if not isinstance(values, list | tuple) or not values or type(values[0]) is int:
        return values
    found = used(values, uses)
    return type(values)(*found) if hasattr(values, "_fields") else type(values)(found)


def is_own(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function concerns a parameter itself, not its value in autograd's graph."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ not in _RECORDED_PROPERTIES
    if name in ("__set__", "__delete__") or func in _OF_PARAMETER_ITSELF or func in LEAVES:
        return True
    changed = kwargs.get("out")
    if changed is None and is_in_place(name):
        changed = args[0] if args else next(iter(kwargs.values()))
    if isinstance(changed, list | tuple) and changed:
        changed = changed[0]
    return isinstance(changed, InUse)


def _on_parameters(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls torch's function on parameters themselves."""
    args, kwargs = as_dtensors((args, kwargs))
    with _usual_class((*args, *kwargs.values())):
        result = func(*args, **kwargs)
    if func.__name__ == "__set__" or is_in_place(func.__name__):
        for x in each_of(InUse, (*args, *kwargs.values())):
            _renew(x)
    return result


def _renew(x: Any) -> None:
    if running.uses is not None:
        running.uses.renew(x)


def _is_distributed(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_distributed, value))
    return isinstance(value, DTensor) and not isinstance(value, InUse)


def _is_recorded(value: Any) -> bool:
    if type(value) is Activation or isinstance(value, list | tuple):
        return needs_gradient(value)
    return isinstance(value, Tensor) and value.requires_grad


def _without_layout(result: Any) -> Any:
    """A result of parameters alone: a plain tensor if every rank has all of it and no gradient is recorded."""
    if type(result) in (tuple, list):
        return type(result)(map(_without_layout, result))
    if not isinstance(result, DTensor) or _is_recorded(result):
        return result
    found = as_dtensors(result)
    return found._local_tensor if all(placement.is_replicate() for placement in found.placements) else found
