"""Which operators a policy of selective checkpoints (`create_selective_checkpoint_contexts`) is asked about.

Torch counts the operators of each kind within a checkpointed function, and takes a saved result by its number. With a
distributed model it also sees what moves halos, gathers parameters, or computes what parts in turn share, which is not
the same in forward and when it is computed again. So only operators that move nothing and cost most are saved:
convolutions, products of matrices, attention, and a program's own. Others are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from distconv.rules.operands import once
from distconv.tensors.replacements import in_place_of, replace

_SAVED = {"aten::convolution", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
_OF_LIBRARIES = {"aten", "prims", "c10d", "_c10d_functional", "_dtensor", "distconv", "mucudnn"}


@functools.lru_cache(maxsize=4096)
def _may_be_saved(function: Any) -> bool:
    if not isinstance(function, torch._ops.OpOverload):
        return True  # an operator of higher order
    name = function._schema.name
    return name in _SAVED or name.startswith("aten::_scaled_dot_product") or function.namespace not in _OF_LIBRARIES


def _dispatched(stock: Callable[..., Any], self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if _may_be_saved(func) and not once.thread.computes:
        return stock(self, func, types, args, kwargs)
    is_in_forward = isinstance(self, torch.utils.checkpoint._CachingTorchDispatchMode)
    if is_in_forward and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        _keep(self.storage, func, args)
    return func(*args, **(kwargs or {}))


def _keep(saved: Any, function: Any, args: Sequence[Any]) -> None:
    """Copies saved results that a function is about to change, as a convolution changes rows that read a late halo."""
    written = {
        x.untyped_storage()._cdata
        for x, argument in zip(args, function._schema.arguments, strict=False)
        if isinstance(x, Tensor) and argument.alias_info is not None and argument.alias_info.is_write
    }
    for kept in tree_leaves(saved):
        x = getattr(kept, "val", None)
        if isinstance(x, Tensor) and x.untyped_storage()._cdata in written:
            kept.val = x.clone(memory_format=torch.preserve_format)
            kept.version = kept.val._version


def open_selective_checkpoints() -> None:
    """Makes selective checkpoints save some operators only, from now on."""
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"):
        mode: Any = getattr(torch.utils.checkpoint, name)
        replace(mode, "__torch_dispatch__", in_place_of(mode.__torch_dispatch__, _dispatched))
