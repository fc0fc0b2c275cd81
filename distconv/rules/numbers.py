"""One number out of a distributed tensor: `.item()`, `float()`, `bool()`, formatting, lists and arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.agreement.ledger import settle
from distconv.refusal import UnsupportedOperation
from distconv.rules.elementwise import in_place
from distconv.rules.plain_updates import whole_beside
from distconv.rules.reduction import settled
from distconv.rules.registry import method, rule
from distconv.transfer.local_part import everywhere
from distconv.transfer.partial_sums import added


@rule("aten::_local_scalar_dense")
def item(func: Any, x: DTensor) -> float | int | bool:
    """The element of a tensor of one element, the same on every rank."""
    return torch.ops.aten._local_scalar_dense.default(_replicated(x, ".item()"))


def _replicated(x: DTensor, what: str) -> Tensor:
    """The plain tensor of a DTensor without shards, or of one element."""
    x = everywhere(added(x), range(x.dim())) if x.numel() == 1 else x
    local, (mesh, placements) = settled(what, x)
    if any(p.is_shard() and mesh.size(axis) > 1 for axis, p in enumerate(placements)):
        raise UnsupportedOperation(
            f"{what} of a tensor {tuple(x.shape)} laid out as {placements}: use distconv.gather first"
        )
    settle(x.device_mesh)
    return local


# PyTorch refuses these three for every subclass.
@method("__format__")
def formatted(stock_method: Any, x: DTensor, spec: str) -> str:
    """A number, as one process writes it."""
    return format(x.item(), spec) if x.dim() == 0 and spec else object.__format__(x, spec)


@method("tolist")
def as_list(stock_method: Any, x: DTensor) -> Any:
    """Numbers in lists, of a tensor without shards."""
    return _replicated(x, ".tolist()").tolist()


@method("numpy")
def as_array(stock_method: Any, x: DTensor, *, force: bool = False) -> Any:
    """An array, of a tensor without shards."""
    if x.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return _replicated(x, ".numpy()").numpy(force=force)


@rule("aten::add_.Tensor")
def add_in_place(func: Any, x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Also to a plain tensor, as a script's running sums are."""
    if isinstance(x, DTensor):
        return in_place(func, x, other, alpha=alpha)
    return func(x, whole_beside(func, other), alpha=alpha)
