"""A copy of a model, and of the arguments of a call, whose tensors have shapes but no numbers."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.model.direct.chains.call import share_choices
from distconv.model.fully_sharded import format_of, is_fully_sharded
from distconv.model.homes import ALONE
from distconv.turns.shapes_only import INTEGERS, MOST_NUMBERS


def without_numbers(
    module: nn.Module, args: Any, kwargs: Any, shapes: FakeTensorMode
) -> tuple[nn.Module, Any, Any, list[Tensor]]:
    """A copy of a module, and the arguments of a call, without numbers and on a processor; and all their tensors."""
    known: dict[int, Any] = {}
    kept = [value for each in module.modules() for value in vars(each).values() if type(value) in _MAY_HAVE_RESULTS]
    for x in (*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs, kept))):
        if isinstance(x, Tensor) and id(x) not in known:
            known[id(x)] = _without_numbers(x, shapes)
    memo: dict[int, Any] = dict(known)
    functions = {id(each): each for each in _functions(module)}
    memo |= {key: _with_empty_closure(each) for key, each in functions.items()}
    copied = copy.deepcopy(module, memo)
    for key, each in functions.items():
        made = memo[key]
        for cell, empty in zip(each.__closure__ or (), made.__closure__ or (), strict=True):
            empty.cell_contents = _of_copy(cell.cell_contents, memo)
        made.__defaults__ = _of_copy(each.__defaults__, memo)
        made.__kwdefaults__ = each.__kwdefaults__ and {k: _of_copy(x, memo) for k, x in each.__kwdefaults__.items()}
    for inner in copied.modules():
        vars(inner).update(_references_to_copies(inner, memo))
    share_choices(module, copied)
    args, kwargs = tree_map_only(Tensor, lambda x: known[id(x)], (args, kwargs))
    return copied, args, kwargs, list(known.values())


def drop_gradients(copied: nn.Module) -> None:
    """Drops the gradients that parameters of a copy have. Parts add up their gradients before those of earlier calls
    come to them, so that each has its own beside these."""
    for x in copied.parameters():
        x.grad = None


_MAY_HAVE_RESULTS = Tensor, list, tuple, dict
"""Types of attributes in which a module may keep results. ``deepcopy`` fails for tensors that autograd has recorded."""


def _without_numbers(x: Tensor, shapes: FakeTensorMode) -> Tensor:
    """A tensor of the same shape and strides on a processor, without numbers; to autograd it is a leaf, as are the
    inputs of parts.

    Few integers, such as a padding that is a buffer, keep their numbers: programs compute shapes from these.
    """
    if is_fully_sharded(x):  # which is gathered for its use
        with shapes:
            empty = torch.empty(x.shape, dtype=x.dtype, memory_format=format_of(x))  # type: ignore[arg-type]
        whole = nn.Parameter(empty, x.requires_grad)
        setattr(whole, ALONE, True)
        return whole
    if x.device.type == "cpu" and x.numel() <= MOST_NUMBERS and x.dtype in INTEGERS and type(x) is Tensor:
        return shapes.fake_tensor_converter.from_real_tensor(shapes, x.clone(), make_constant=True)
    if x.device.type == "cpu":
        return shapes.from_tensor(x) if x.is_leaf else shapes.from_tensor(x.detach()).requires_grad_()
    with shapes:
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(empty, x.requires_grad)
    return empty.requires_grad_(x.requires_grad)


def _functions(module: nn.Module) -> Iterator[types.FunctionType]:
    """The hooks of modules, and functions among their attributes, that refer to objects: often to a module of the
    model or a method of it, as a forward does that calls the one it replaces. In a copied model it must be the copy's.
    """
    attributes = (value for each in module.modules() for value in vars(each).values())
    waiting = [x for value in attributes for x in (value.values() if isinstance(value, dict) else (value,))]
    seen = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, functools.partial):
            waiting += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            variables = _variables(value)
            if any(isinstance(x, _REFERRING) for x in variables):
                waiting += variables
                yield value


_REFERRING = nn.Module, Tensor, types.FunctionType, types.MethodType, functools.partial, list, tuple


def _variables(function: types.FunctionType) -> list[Any]:
    """What a function refers to besides globals; nothing where a variable has no value yet."""
    cells = function.__closure__ or ()
    if any(cell == types.CellType() for cell in cells):
        return []
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return [*(cell.cell_contents for cell in cells), *defaults]


def _of_copy(value: Any, known: dict[int, Any]) -> Any:
    """A value of a variable, with the copies of modules, their methods, and tensors; any other value itself."""
    if type(value) in (list, tuple):
        items = [_of_copy(item, known) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _of_copy(value.__self__, known))
    if type(value) is functools.partial:
        given = {name: _of_copy(item, known) for name, item in value.keywords.items()}
        return functools.partial(_of_copy(value.func, known), *_of_copy(value.args, known), **given)
    return known.get(id(value), value) if isinstance(value, nn.Module | Tensor | types.FunctionType) else value


def _references_to_copies(module: nn.Module, memo: Mapping[int, Any]) -> dict[str, Any]:
    """The weak references among a module's attributes, to the copies of what they refer to."""
    found = {name: value() for name, value in vars(module).items() if isinstance(value, weakref.ref)}
    return {name: weakref.ref(memo[id(value)]) for name, value in found.items() if id(value) in memo}


def _with_empty_closure(function: types.FunctionType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in function.__closure__ or ()) or None
    code, name = function.__code__, function.__name__
    made = types.FunctionType(code, function.__globals__, name, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made
