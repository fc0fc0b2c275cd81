"""Values that leave torch: `.item()`, `float()`, `bool()`, formatting, lists, and arrays of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.elementwise import in_place
from distconv.rules.registry import method, rule
from distconv.rules.whole import whole_value
from distconv.rules.whole.plain_updates import whole_beside
from distconv.tensors import hooks
from distconv.transfer.local_part import replicate_single_dims
from distconv.transfer.partial_sums import added


def _copied(what: str, x: DTensor) -> Tensor:
    whole = whole_value(what, x.detach()).clone()
    for notify in hooks.after_copies:
        notify(x, whole)
    return whole


@rule("aten::_local_scalar_dense")
def item(func: Any, x: DTensor) -> float | int | bool:
    """The element of a tensor of one element, the same on every rank."""
    x = replicate_single_dims(added(x), range(x.dim())) if x.numel() == 1 else x
    return torch.ops.aten._local_scalar_dense.default(whole_value(".item()", x))


# PyTorch refuses most of these for every subclass.
@method("__format__")
def formatted(stock_method: Any, x: DTensor, spec: str) -> str:
    """A number, as one process writes it."""
    return format(x.item(), spec) if x.dim() == 0 else object.__format__(x, spec)


@method("tolist")
def as_list(stock_method: Any, x: DTensor) -> Any:
    """Numbers in lists."""
    return whole_value(".tolist()", x).tolist()


@method("numpy")
def as_array(stock_method: Any, x: DTensor, *, force: bool = False) -> Any:
    """An array of the whole tensor, whose memory no tensor shares."""
    if x.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return _copied(".numpy()", x).numpy(force=force)


@method("__dlpack__")
def as_capsule(stock_method: Any, x: DTensor, **options: Any) -> Any:
    """The whole tensor for another library."""
    return _copied(".__dlpack__()", x).__dlpack__(**options)


@method("__dlpack_device__")
def capsule_device(stock_method: Any, x: DTensor) -> Any:
    """Where that is."""
    return x._local_tensor.__dlpack_device__()


@rule("aten::add_.Tensor")
def add_in_place(func: Any, x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Also to a plain tensor, as a script's running sums are."""
    if isinstance(x, DTensor):
        return in_place(func, x, other, alpha=alpha)
    return func(x, whole_beside(func, other), alpha=alpha)
