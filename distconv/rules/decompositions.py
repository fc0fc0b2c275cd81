"""Operators with neither a rule here nor a strategy of DTensor: they are decomposed, or refused at once.

DTensor would search the layouts of all operands for one under which the parts of such an operator move nothing. Their
number grows as the product over operands and axes, and an answer took minutes. Here the parts of the operator, as
torch's decompositions name them, run one after the other, each by its own rule. If a part is refused, so is the
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.private_names import UNRULED, lacks
from distconv.rules.outside import answered
from distconv.rules.schemas import changed_tensors
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation, complete, operands_of, refuse
from distconv.tensors.replacements import replace
from distconv.tensors.user_lines import asked_for
from mucudnn.process.warning import warn

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
