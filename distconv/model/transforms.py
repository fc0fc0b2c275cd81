"""Transforms of functions (`torch.func`): a model called within one, or with dual numbers, runs whole on every rank.

A transform differentiates or batches plain operators, and knows nothing of messages. So within a transform all ranks
compute the same, with plain tensors: distributed ones are gathered when a transform is given them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.fx import _symbolic_trace
from torch.utils._pytree import tree_map_only

from distconv.model.replacement import Replaced, current
from distconv.model.shard_gather import gather
from distconv.private_names import TRANSFORMS, lacks, require
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import in_place_of
from mucudnn.process import substituted

OF_FUNCTIONS = ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian")  # Return a function.

OF_VALUES = ("vjp", "jvp", "linearize")  # Are given a function and its arguments.


def is_transformed() -> bool:
    """Whether a transform, or forward differentiation, is active."""
    if torch._C._are_functorch_transforms_active():
        require(TRANSFORMS)
        return True
    return not lacks(TRANSFORMS) and forward_ad._current_level >= 0


@contextlib.contextmanager
def transforms_of_whole_tensors() -> Iterator[None]:
    """A context in which transforms gather the distributed tensors that they are given. All ranks must call them."""
    with contextlib.ExitStack() as undo:
        for library, names in ((torch.func, (*OF_FUNCTIONS, *OF_VALUES)), (torch, ("vmap",))):
            kinds = {name: _transformed if name in OF_VALUES else _transforming for name in names}
            wrapped = {name: in_place_of(getattr(library, name), kind) for name, kind in kinds.items()}
            undo.enter_context(substituted(library, **wrapped))
        for name in ("jacobian", "hessian"):
            looping = in_place_of(getattr(torch.autograd.functional, name), _looping)
            undo.enter_context(substituted(torch.autograd.functional, **{name: looping}))
        yield


def _looping(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`jacobian` or `hessian` of `torch.autograd.functional` without `vectorize`, which would batch backward passes."""
    given = inspect.signature(real).bind(*args, **kwargs).arguments
    if "forward-mode" not in given.values():
        given["vectorize"] = False
    return real(**given)


def _transformed(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    require(TRANSFORMS)
    # linearize traces, and calls modules by the `__call__` that they had when torch was imported.
    with substituted(_symbolic_trace, _orig_module_call=nn.Module.__call__):
        return transform(*_whole(args), **_whole(kwargs))


def _transforming(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return in_place_of(transform(*args, **kwargs), _transformed)


def _whole(values: Any) -> Any:
    values = tree_map_only(Replaced, current, values)
    return tree_map_only(DTensor, lambda x: gather(x) if is_ours(x.device_mesh) else x, values)
