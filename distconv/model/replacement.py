"""Gives a sharded tensor another value, shape or dtype, while it stays the same object to whoever refers to it.

`.half()` and `.to()` of a module, parametrizations, and `parameter.data = ...` do this. Torch's own code would change
the DTensor, but not its local tensor. A script's lists and optimizers may also still contain parameters that sharded
ones have replaced: these are known here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from distconv.model.direct.activation import Activation, as_dtensors
from distconv.model.direct.graphs import follow, memory
from distconv.model.direct.parameters import InUse
from distconv.model.direct.paths import running
from distconv.model.earlier_graphs import pass_gradients
from distconv.model.parameter_hooks import HOOKS
from distconv.model.shard_gather import sharded, sharded_like, whole
from distconv.private_names import RESHAPED, require
from distconv.rules.whole import whole_value
from distconv.tensors import replacements
from distconv.tensors.mesh import is_ours
from distconv.tensors.read_parts import DATA, follow_data
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import until_put_back
from distconv.transfer.redistribution import unsharded

called_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # The modules of models that have been called.


def state_of_called_modules() -> Iterator[Tensor]:
    """The parameters and buffers of the modules of models that have been called."""
    for module in list(called_modules):
        own: Any
        for own in (module._parameters, module._buffers):
            if isinstance(own, dict):  # `dict.values`: the method of a subclass would wait for running statistics
                yield from (x for x in dict.values(own) if x is not None)


def memory_of(x: Any) -> int:
    """An identifier of the memory of a tensor, or of its local tensor: the storage, or the id where there is none."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(x, DTensor):
            x = x._local_tensor
        return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def _refuse_copy(x: Tensor, value: Tensor) -> None:
    """Refuses a value for x that has the memory of another parameter or buffer: in one process they would share it.

    Raises:
        UnsupportedOperation: says what is accepted.
    """
    memory = memory_of(value)
    if any(memory_of(other) == memory for other in state_of_called_modules() if other is not x):
        raise UnsupportedOperation(
            f".data = ... of a tensor {tuple(x.shape)}: the value {tuple(value.shape)} has the memory of a parameter or"
            " buffer in another layout, and cannot share it; accepted: one parameter in both places,"
            " .data.copy_(value), or .data = value.clone()"
        )


def set_value(x: DTensor, value: Tensor) -> None:
    """Gives x another value. Graphs that were made with x still pass their gradients to x."""
    new = sharded_like(x, value)
    if memory_of(new) != memory_of(value):
        _refuse_copy(x, value)
    if new.shape != x.shape or new.dtype != x.dtype or new.device != x.device:
        new.requires_grad_(x.requires_grad)
        if not try_swap(x, new):
            DATA.__set__(x, new)
        else:
            for name in HOOKS:  # set again, since torch keeps them also with the swapped parts
                if getattr(x, name) is not None:
                    setattr(x, name, getattr(x, name))
            pass_gradients(new, x)
    x._local_tensor, x._spec = new._local_tensor, new._spec


def try_swap(x: Tensor, other: Tensor) -> bool:
    """Exchanges the contents of two tensors. False if torch cannot, as while torch.profiler records shapes."""
    require(RESHAPED)
    try:
        torch._C._swap_tensor_impl(x, other)
    except RuntimeError as error:
        if "weakrefs" not in str(error):
            raise
        return False
    return True


@until_put_back
def open_replacement() -> None:
    """From now on sharded tensors take other values whole, where torch swaps tensors or sets their data."""
    swap_tensors = replacements.in_place_of(torch.utils.swap_tensors, _swap_tensors)
    replacements.replace(torch.utils, "swap_tensors", swap_tensors)

    def set_data(x: DTensor, value: Tensor) -> None:
        value = as_dtensors(value)
        if type(x) is Activation:
            x.set_data(sharded(value.detach(), x.device_mesh, x.placements))
        elif is_ours(x.device_mesh):
            before = memory(x)
            set_value(x, value)
            follow(x, before)
        else:
            DATA.__set__(x, value)

    def data_of_sharded(x: DTensor) -> Any:
        found = DATA.__get__(x)
        if isinstance(found, DTensor) and is_ours(found.device_mesh):  # in torch, `.data` has its own version counter
            found._local_tensor = found._local_tensor.data
        return found

    def data_of_plain(x: Tensor) -> Any:
        if running.uses is not None:
            running.uses.given_out.add(id(x))
        return DATA.__get__(x)

    def set_data_of_plain(x: Tensor, value: Tensor) -> None:
        if isinstance(x, DTensor):  # the program has used Tensor's property on a DTensor
            type(x).data.__set__(x, value)  # type: ignore[attr-defined]
            return
        if isinstance(value, DTensor) and is_ours(value.device_mesh):
            given = as_dtensors(value)
            value = unsharded(given) if isinstance(x, nn.Parameter) else whole_value("Tensor.data", given)
            if memory_of(value) != memory_of(given):
                _refuse_copy(x, given)
        before = memory(x)
        follow_data(x, value)
        DATA.__set__(x, value)
        follow(x, before)

    make: Any = nn.Parameter.__new__

    @functools.wraps(make)
    def new(cls: Any, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        if type(data) is Replaced:
            data = current(data)
        if isinstance(data, DTensor) and is_ours(data.device_mesh):
            found = as_dtensors(data.detach())
            data = found._local_tensor if all(p.is_replicate() for p in found.placements) else found
        return make(cls, data, requires_grad)

    replacements.replace(nn.Parameter, "__new__", new)
    replacements.replace(Tensor, "data", property(data_of_plain, set_data_of_plain))
    replacements.replace(DTensor, "data", property(data_of_sharded, set_data))


def _swap_tensors(stock: Callable[..., Any], t1: Tensor, t2: Tensor) -> None:
    if not any(isinstance(x, InUse) or (isinstance(x, DTensor) and is_ours(x.device_mesh)) for x in (t1, t2)):
        stock(t1, t2)
        return
    if isinstance(t1, nn.Parameter) and isinstance(t2, nn.Parameter):
        t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    was = t1.detach().clone(), t1.requires_grad, t1.grad
    for x, (value, requires_grad, grad) in ((t1, (t2.detach().clone(), t2.requires_grad, t2.grad)), (t2, was)):
        x.grad = None
        x.data = value
        if x.is_leaf:
            x.requires_grad_(requires_grad)
        if isinstance(x, DTensor) and grad is not None:
            x.grad = sharded_like(x, grad)
        else:
            x.grad = whole(grad) if isinstance(grad, DTensor) else grad


T = TypeVar("T", bound=Tensor | None)


class Replaced(nn.Parameter):
    """An old parameter, now without a value: functions of it are computed with the one that has replaced it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Replaced, current, args), **tree_map_only(Replaced, current, kwargs or {}))

    data = property(lambda self: current(self).data, lambda self, value: setattr(current(self), "data", value))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(current(self))


successors: Any = WeakIdKeyDictionary()  # From each replaced parameter to the one that has replaced it.


def current(parameter: T) -> T:
    """The parameter itself, or the one that has replaced it; None for None."""
    found: T = successors[parameter] if type(parameter) is Replaced else parameter
    return found


@contextlib.contextmanager
def replaced_by(others: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """A context in which replaced parameters represent others, which are given by the ids of the sharded ones."""
    before = {old: now for old, now in successors.items() if id(now) in others}
    successors.update((old, others[id(now)]) for old, now in before.items())
    try:
        yield
    finally:
        successors.update(before)
