"""Fallback: what runs an operator without a rule of its own.

In this order: for an operator in place, the one that makes a new tensor; DTensor's strategy, where it moves no shard;
the operators that it decomposes into (`distconv.rules.stock`); the operator on whole tensors, where they are
small. Otherwise it is refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from distconv.rules.elementwise import elementwise, in_place
from distconv.rules.registry import rule, schemas_without_rule
from distconv.rules.schemas import full_name, is_tensor, is_view, name_of, operator
from distconv.rules.stock import has_strategy, leave, without_strategy
from distconv.rules.whole import whole_beside, whole_or_refused
from distconv.tensors.refusal import UnsupportedOperation, refuse
from distconv.transfer.local_part import local_as


def fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on our tensors for which distconv has no rule of its own."""
    name = name_of(func)
    if torch.Tag.inplace_view in func.tags:
        why = "it changes the shape of a sharded tensor in place; accepted: the operator that makes a view"
        raise refuse(func, why, whole_helps=False)
    functional = _without_suffix(func, "_") if name.endswith("_") else None
    if functional is not None:
        return _assigned(func, functional, args, kwargs)
    viewing = _without_suffix(func, "_copy") if name.endswith("_copy") else None
    if viewing is not None:
        return tree_map(lambda y: y.clone() if isinstance(y, Tensor) else y, viewing(*args, **kwargs))
    try:
        return leave(func, *args, **kwargs) if has_strategy(func) else without_strategy(func, args, kwargs)
    except UnsupportedOperation as error:
        return whole_or_refused(func, args, kwargs, error)


def _without_suffix(func: Any, suffix: str) -> Any:
    """The operator of the same name without a suffix and with as many arguments, or None."""
    found = operator(f"{name_of(func).removesuffix(suffix)}.{func._schema.overload_name}")
    same = found is not None and len(found._schema.arguments) == len(func._schema.arguments)
    return found if same else None


def _assigned(func: Any, functional: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The first argument, with the elements that the operator gives that makes a new tensor."""
    x = args[0]
    result = functional(*args, **kwargs)
    if result.shape != x.shape:
        raise RuntimeError(f"{func}: a result {tuple(result.shape)} for a tensor {tuple(x.shape)}")
    if not isinstance(x, DTensor):
        x.copy_(whole_beside(func, result))
    else:
        x._local_tensor.copy_(local_as(result, x.device_mesh, x.placements))
    return x


CHUNKED = "torch.nn.modules.linear_cross_entropy"
OTHERS = ("torch_nn::_linear_cross_entropy_batch_chunked", "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
STAYS_WITH_TORCH = (
    *("new_", "set", "record_stream", "is_", "resize", "lift", "detach", "zero_", "fill_", "_has_same", "_lazy"),
    *("_to_copy", "_foreach", "_fused", "_amp", "_assert", "_functional", "_make_", "_fw_", "_nested"),
)
"""Prefixes of operators that concern a tensor itself, or a list of tensors, and not its elements."""


def register() -> None:
    """Gives every operator on tensors that has no rule one: its own shard where it works on corresponding elements,
    else `fallback`. Views and operators on one tensor element by element stay with DTensor, which runs them as fast as
    can be.
    """
    operators: dict[Any, list[str]] = {}
    for name, schema in schemas_without_rule():
        operators.setdefault(_handler(schema), []).append(name)
    operators.pop(None, None)
    for handler, names in operators.items():
        rule(*names)(handler)
    if importlib.util.find_spec(CHUNKED) is not None:  # torch 2.13 has operators of another name than aten
        importlib.import_module(CHUNKED)
        rule(*OTHERS)(fallback)


def _handler(schema: Any) -> Any:
    """The function that runs an operator without a rule; None for one that stays with torch."""
    name = schema.name.removeprefix("aten::")
    func = operator(f"{name}.{schema.overload_name}")
    if func is None:
        return None
    if any(argument.is_out for argument in schema.arguments):
        reads = any(is_tensor(a.type) for a in schema.arguments if not a.is_out)
        is_torchs = torch.Tag.generated in func.tags or name.startswith("_")
        return written if reads and not is_torchs and without_outputs(func) is not None else None
    if torch.Tag.pointwise not in func.tags:
        return fallback if _is_for_fallback(func, name, schema) else None
    several = sum(is_tensor(argument.type) for argument in schema.arguments) > 1
    if name == "equal":  # its result is one answer
        return None
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return in_place if several else None
    # DTensor takes an operator whose name ends so for one in place: `x >> 1` would be x.
    return elementwise if several or not has_strategy(func) or name.endswith("_") else None


def _is_for_fallback(func: Any, name: str, schema: Any) -> bool:
    if name.startswith(STAYS_WITH_TORCH) or name.endswith("_like"):
        return False
    if not any(is_tensor(a.type) for a in schema.arguments):
        return False
    return not (has_strategy(func) and is_view(func)) or name == "diagonal"


def written(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors that are given by ``out=``, to which the result is written: whole to plain ones, else by shards."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    compute, outputs = without_outputs(func), [kwargs.pop(name) for name in names]
    found = compute(*args, **kwargs)
    for output, made in zip(outputs, found if isinstance(found, tuple) else (found,), strict=True):
        _write(func, output, made)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@functools.cache
def without_outputs(func: Any) -> Any:
    """The operator that makes new tensors of the same arguments; None where there is none."""
    given = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in getattr(torch.ops.aten, name_of(func)).overloads():
        found = operator(f"{name_of(func)}.{overload}")
        arguments = found._schema.arguments
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if not changes and [(a.name, str(a.type)) for a in arguments] == given:
            return found
    return None


def _write(func: Any, output: Tensor, made: Tensor) -> None:
    if not torch.can_cast(made.dtype, output.dtype):
        raise RuntimeError(
            f"{full_name(func)}: result type {made.dtype} can't be cast to the desired output type {output.dtype}"
        )
    if not isinstance(output, DTensor):
        whole = whole_beside(func, made)
        if output.shape != whole.shape:  # as torch does, with its warning
            output.resize_(whole.shape)
        output.copy_(whole)
    elif output.shape != made.shape:
        raise refuse(func, f"a result {tuple(made.shape)} for a tensor {tuple(output.shape)}; accepted: of its shape")
    else:
        output._local_tensor.copy_(local_as(made, output.device_mesh, output.placements))
