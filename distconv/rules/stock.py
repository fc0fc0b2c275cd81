"""What torch's DTensor does with an operator by itself, for operators of our DTensors without a rule.

A rule that is registered for an operator hides DTensor's own dispatch of it, so its steps are repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import return_and_correct_aliasing

from distconv.private_names import UNRULED, require
from distconv.rules.decompositions import has_strategy, without_strategy
from distconv.tensors.refusal import refuse
from distconv.transfer.graph_collectives import pinned_to_graph


def stock(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """DTensor's own behaviour of an operator that has a rule here; what would gather a shard is refused."""
    require(UNRULED)
    dispatcher = DTensor._op_dispatcher
    if not has_strategy(func):
        return without_strategy(func, args, kwargs or {})
    info = dispatcher.unwrap_to_op_info(func, tuple(args), kwargs or {})
    dispatcher.sharding_propagator.propagate(info)
    assert info.output_sharding is not None
    spec: Any = info.output_sharding.output_spec
    if func._schema.name.endswith("_") and isinstance(spec, DTensorSpec) and spec.placements != args[0].placements:
        here, there = args[0].placements, spec.placements
        raise refuse(func, f"its result would be laid out as {there}, but it changes a tensor laid out as {here}")
    with pinned_to_graph():  # DTensor redistributes arguments by collectives of its own
        results = dispatcher._dispatch_get_local_results_slow_path(func, tuple(args), info)
    return dispatcher.wrap(results, spec)


def leave(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on our tensors for which distconv has no rule of its own."""
    special = DTensor._op_dispatcher._custom_op_handlers.get(func)
    if special is not None:
        return special(func, args, kwargs)
    parts = func.decompose(*args, **kwargs)
    return _finished(func, args, kwargs, stock(func, args, kwargs)) if parts is NotImplemented else parts


def _finished(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The return value of an operator with this result: the tensors that it has changed, if any."""
    if func is torch.ops.aten.equal.default:
        return _equal_on_all(result, args)
    if func._schema.name.endswith("_"):
        if isinstance(args[0], DTensor) and isinstance(result, DTensor):
            args[0]._spec = result._spec
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, tuple(args), kwargs, args[0])
        return args[0]
    outputs = [kwargs[argument.name] for argument in func._schema.arguments if argument.is_out]
    for output, computed in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
        output._spec = computed._spec
    return result if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)


def _equal_on_all(local: bool, args: Sequence[Any]) -> bool:
    mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
    flag = torch.tensor(int(local), device=mesh.device_type)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
