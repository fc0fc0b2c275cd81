"""What runs an operator of our DTensors without a rule: DTensor's strategy, its decomposition, or the whole tensors.

A rule that is registered for an operator hides DTensor's own dispatch of it, so its steps are repeated here. Without a
strategy, DTensor would search the layouts of all operands for one under which the parts of an operator move nothing.
Their number grows as the product over operands and axes, and an answer took minutes. Here the parts of the operator, as
torch's decompositions name them, run one after the other, each by its own rule. If a part is refused, so is the
operator. In the script, outside every model's call, what is refused on shards runs on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.private_names import UNRULED, lacks, require
from distconv.rules.schemas import changed_tensors
from distconv.tensors import hooks
from distconv.tensors.dtensors import wrap
from distconv.tensors.gathering.record import in_model_call
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation, complete, operands_of, refuse
from distconv.tensors.replacements import replace
from distconv.tensors.user_lines import asked_for
from distconv.transfer.group_calls import pinned_to_graph
from mucudnn.process import warn


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


_TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
"""The tables in which DTensor keeps its operators; their names differ between releases."""


def has_strategy(func: Any) -> bool:
    """Whether DTensor knows the layout of an operator's result without a search."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return any(func in getattr(propagator, table, ()) for table in _TABLES)


def without_strategy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without rule and strategy on tensors of distconv's meshes.

    UnsupportedOperation where it cannot be taken apart into parts with rules.
    """
    parts = func.decompose(*args, **kwargs)
    if parts is not NotImplemented:
        return parts
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.inplace_view in func.tags:
        raise refuse(func, "no rule runs it on distributed tensors")
    distributed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if all(placement.is_replicate() for tensor in distributed for placement in tensor.placements):
        return _on_whole(func, args, kwargs, distributed[0])
    decomposed = decomposition_table.get(func)
    if decomposed is None:
        raise refuse(func, "no rule runs it on shards")
    try:
        return decomposed(*args, **kwargs)
    except UnsupportedOperation as error:
        raise refuse(func, f"no rule runs it on shards, and its part {error.operator}: {error.why}") from error


def _on_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], like: DTensor) -> Any:
    """The operator on replicated tensors."""
    mesh = like.device_mesh
    locals, options = tree_map_only(DTensor, lambda x: x._local_tensor, (tuple(args), kwargs))
    result = func(*locals, **options)
    if func._schema.is_mutable:
        given = changed_tensors(func, args, kwargs)
        return None if result is None else given[0] if isinstance(result, Tensor) else tuple(given)
    return tree_map_only(Tensor, lambda x: wrap(x, mesh, replicated(mesh), x.shape), result)


def install_decompositions() -> None:
    """Makes DTensor ask here for operators without rule and strategy on distconv's meshes, where it would search."""
    if line := lacks(UNRULED):
        warn(line, "distconv")
        return
    dispatcher = DTensor._op_dispatcher
    search = dispatcher._propagate_op_sharding_dispatch_slow_path

    def at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: Any, try_cache: bool) -> Any:
        if not is_ours(op_info.compute_mesh) or has_strategy(func):
            return search(func, args, kwargs, op_info, try_cache)
        try:
            return answered(lambda func, *args, **kwargs: without_strategy(func, args, kwargs), func, args, kwargs)
        except UnsupportedOperation as error:
            complete(error, func, operands_of((*args, *kwargs.values())), asked_for)
            raise

    replace(dispatcher, "_propagate_op_sharding_dispatch_slow_path", at_once)


def may_run_whole(error: UnsupportedOperation) -> bool:
    """Whether a refused operator is to run on whole tensors instead."""
    return error.whole_helps and not in_model_call()


def answered(handler: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a rule, else of the operator on whole tensors. UnsupportedOperation if neither may run."""
    try:
        return handler(func, *args, **kwargs)
    except UnsupportedOperation as error:
        if not may_run_whole(error):
            raise
        return hooks.whole_operators[0](func, args, kwargs, error)
