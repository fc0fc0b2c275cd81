"""Memory as oneDNN lays it out: of a sharded tensor it is an ordinary copy, which convolutions take like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule


@rule("aten::to_mkldnn")
def to_mkldnn(_: Any, x: DTensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy, in dtype."""
    return torch.ops.aten._to_copy(x, dtype=x.dtype if dtype is None else dtype)


@rule("aten::to_mkldnn_backward")
def to_mkldnn_backward(_: Any, grad: DTensor, x: DTensor) -> Tensor:
    """The gradient of what was copied."""
    return grad.to(x.dtype)
