"""Parameters in use: while a model runs, each of its parameters stays the object that the program's optimizer has.

What reads or changes a parameter itself (its `data`, its `grad`, in-place functions, hooks) is torch's own, on the
parameter itself, and so is what is computed from parameters and plain tensors without a gradient: it counts as in one
process. Every other function is given the parameter's activation, or its DTensor, in its place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.activation import Activation, as_dtensors, needs_gradient
from distconv.model.direct.blank import Blank
from distconv.model.direct.paths import LEAVES, Operand, Parameters, is_in_place, running
from distconv.model.direct.where import Where
from distconv.tensors.arguments import each_of

_OWN = (
    *(Tensor.detach, Tensor.detach_, Tensor.register_hook, Tensor.retain_grad, Tensor.is_set_to, torch.is_same_size),
    *(Tensor.register_post_accumulate_grad_hook, Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr),
    *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.element_size, Tensor.__hash__),
    *(Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__len__, Tensor.__format__, Tensor.__repr__),
)
"""Functions that concern a parameter itself, besides its properties and what changes it."""

_OTHERS = {int, float, bool, str, type(None), Tensor, Activation}
"""Classes of most of a function's arguments, which are no parameters in use and have none in them."""

_OF_GRAPHS = ("T", "mT", "H", "mH", "real", "imag")  # The properties that autograd records.


class InUse:
    """A class before that of a parameter while a model runs with it. Made by `_class`."""

    kind: ClassVar[type[Tensor]]  # The class without this one.

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Blank in types:
            return NotImplemented
        kwargs = kwargs or {}
        if running.uses is None or is_own(func, args, kwargs):
            return _itself(func, args, kwargs)
        given, named = running.uses.given(args, kwargs)
        beside = any(_is_distributed(value) for value in (*args, *kwargs.values()))
        if not beside and not (torch.is_grad_enabled() and any(map(_is_recorded, (*given, *named.values())))):
            return _itself(func, args, kwargs)
        result = func(*given, **named)
        return result if beside else _without_layout(result)

    @property
    def data(self) -> Any:
        if running.uses is not None:
            running.uses.given_out.add(id(self))
        with _as_ever([self]):
            return self.data

    @data.setter
    def data(self, value: Tensor) -> None:
        with _as_ever([self]):
            self.data = value
        _renew(self)

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """As torch's, which asks no class. A sharded one can only be given another tensor."""
        if isinstance(self, DTensor) and len(source) == 1 and isinstance(source[0], Tensor):
            self.data = source[0]
            return self
        with _as_ever([self]):
            self.set_(*source, **kwargs)
        _renew(self)
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        with _as_ever([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_ever([self]):
            return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        with _as_ever([self]):
            return repr(self)


_NO_PARAMETER = types.SimpleNamespace(root=None, place=None)
"""In place of the operand of a bias that a layer does not have."""

_classes: set[Any] = set()  # Those of parameters in use.


@functools.cache
def _class(kind: Any) -> Any:
    made = type(kind.__name__, (InUse, kind), {"kind": kind})
    _classes.add(made)
    return made


def enter(parameter: Tensor) -> None:
    """From now on functions see a parameter as one of a model that runs."""
    parameter.__class__ = _class(type(parameter))


@contextlib.contextmanager
def in_use(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which functions see parameters as those of a model that runs. To a list more may be added in it."""
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
def _as_ever(values: Sequence[Any]) -> Iterator[None]:
    """A context in which the parameters among some values, and lists of them, have their class without this one."""
    changed: list[Any] = list({id(x): x for x in each_of(InUse, values)}.values())
    for x in changed:
        x.__class__ = x.kind
    try:
        yield
    finally:
        for x in changed:
            if not isinstance(x, InUse):
                enter(x)


def used(args: Sequence[Any], uses: Parameters) -> list[Any]:
    """The arguments of a function, with the operand of each parameter in use in its place, in lists too."""
    return [  # of every function with parameters: as few steps as can be
        arg if (kind := type(arg)) in _OTHERS else uses(arg) if kind in _classes else _used_within(arg, uses)
        for arg in args
    ]


def operands(weight: Any, bias: Any) -> tuple[tuple[Any, Tensor | None], tuple[Any, Where | None]] | None:
    """This rank's tensors of a layer's parameters, in use or as activations, and their layouts; None is one of none.

    Without a result where either is another tensor, or its DTensor has been changed in place.
    """
    own_weight, own_bias = _operand(weight), _operand(bias)
    if own_weight is None or own_bias is None:
        return None
    return (own_weight.root, own_bias.root), (own_weight.place, own_bias.place)


def _operand(value: Any) -> Any:
    """What a direct path may compute with in place of a parameter; None for other tensors."""
    if value is None:
        return _NO_PARAMETER
    found: Operand | None = None
    if type(value) in _classes and running.uses is not None:
        found = running.uses.operand(value)
    elif type(value) is Activation and value.share is not None:
        found = value  # type: ignore[assignment]
    return None if found is None or found.changed else found


def _used_within(values: Any, uses: Parameters) -> Any:
    if not isinstance(values, list | tuple) or not values or type(values[0]) is int:
        return values
    found = used(values, uses)
    return type(values)(*found) if hasattr(values, "_fields") else type(values)(found)


def is_own(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function concerns a parameter itself."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ not in _OF_GRAPHS
    if name in ("__set__", "__delete__") or func in _OWN or func in LEAVES:
        return True
    changed = kwargs.get("out")
    if changed is None and is_in_place(name):
        changed = args[0] if args else next(iter(kwargs.values()))
    if isinstance(changed, list | tuple) and changed:
        changed = changed[0]
    return isinstance(changed, InUse)


def _itself(func: Any, args: Any, kwargs: Any) -> Any:
    """What torch makes of parameters themselves."""
    args, kwargs = as_dtensors(args), dict(zip(kwargs, as_dtensors(list(kwargs.values())), strict=True))
    with _as_ever((*args, *kwargs.values())):
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
    """What was computed from parameters alone, plain where every rank has all of it and no gradient is wanted."""
    if type(result) in (tuple, list):
        return type(result)(map(_without_layout, result))
    if not isinstance(result, DTensor) or _is_recorded(result):
        return result
    (found,) = as_dtensors([result])
    return found._local_tensor if all(placement.is_replicate() for placement in found.placements) else found


def converts_operands(x: Tensor) -> bool:
    """Whether autocast is on where a tensor is; never for meta tensors, by which steps are predicted."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return False  # soonest: the device of an activation takes several calls
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
