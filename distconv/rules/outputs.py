"""Outputs: the tensors that a program gives to operators for their results, by ``out=``.

The operator computes as it does without, and what it gives is then written: whole to a plain tensor, by shards to a
sharded one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.schemas import full_name, name_of, operator
from distconv.rules.whole.plain_updates import whole_beside
from distconv.tensors.refusal import refuse
from distconv.transfer.local_part import local_as


def written(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The given tensors, to which the result is written."""
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
