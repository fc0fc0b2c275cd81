"""Operators that make a new tensor after the model of a distributed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.stock import stock
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import has_partial, layout_of
from distconv.tensors.memory_format import CHANNELS_LAST


@rule("aten::eye.out", "aten::eye.m_out")
def eye(func: Any, *extents: int, out: DTensor) -> DTensor:
    """The identity, written to a tensor that has its shape."""
    out.copy_(torch.eye(*extents, dtype=out.dtype, device=out.device))
    return out


@rule("aten::new_empty_strided")
def new_empty_strided(func: Any, x: Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Any:
    """Laid out as x where it has its shape, as when autograd copies a gradient: DTensor of torch 2.11 would not."""
    if isinstance(x, DTensor) and tuple(size) == tuple(x.shape) and not has_partial(x.placements):
        for memory_format in (torch.contiguous_format, CHANNELS_LAST.get(x.dim(), torch.contiguous_format)):
            wanted = torch.empty(tuple(size), device="meta").to(memory_format=memory_format).stride()
            if tuple(stride) == wanted:
                local = torch.empty_like(x._local_tensor, memory_format=memory_format, **kwargs)
                return wrap(local, *layout_of(x), x.shape)
    return stock(func, (x, size, stride), kwargs)
