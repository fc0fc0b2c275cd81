"""Results of functions on tensors without numbers have the strides that torch gives them on a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from distconv.turns.shapes_only import ShapesOnly

FORMS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 16, 6, 8),
    "channels_last": lambda: torch.randn(2, 6, 8, 16).permute(0, 3, 1, 2),
    "channels_last of one sample": lambda: torch.randn(1, 6, 8, 16).permute(0, 3, 1, 2),
    "one sample, ambiguous": lambda: torch.randn(1, 48, 16).transpose(1, 2).reshape(1, 16, 6, 8),
    "permuted": lambda: torch.randn(2, 6, 16, 8).transpose(1, 2),
    "some channels": lambda: torch.randn(2, 20, 6, 8)[:, :16],
    "some rows": lambda: torch.randn(2, 16, 10, 8)[:, :, 1:7],
    "some rows of channels_last": lambda: torch.randn(2, 10, 8, 16).permute(0, 3, 1, 2)[:, :, 1:7],
    "one row": lambda: torch.randn(2, 16, 1, 8),
    "3-D": lambda: torch.randn(2, 16, 3, 6, 8),
    "3-D channels_last": lambda: torch.randn(2, 3, 6, 8, 16).permute(0, 4, 1, 2, 3),
    "expanded": lambda: torch.randn(1, 16, 1, 1).expand(1, 16, 6, 8),
    "one number": lambda: torch.ones(()).expand(1, 16, 6, 8),
    "sequence": lambda: torch.randn(2, 16, 48),
    "sequence, transposed": lambda: torch.randn(2, 48, 16).transpose(1, 2),
    "one sequence, transposed": lambda: torch.randn(1, 48, 16).transpose(1, 2),
}


def batch_norm(x: Tensor, training: bool) -> Any:
    mean, variance = (None, None) if training else (torch.zeros(x.shape[1]), torch.ones(x.shape[1]))
    return torch.native_batch_norm(x, None, None, mean, variance, training, 0.1, 1e-5)


def batch_norm_backward(x: Tensor) -> Any:
    numbers = torch.ones(x.shape[1])
    asked = [True, True, True]
    return torch.ops.aten.native_batch_norm_backward(x * 1, x, None, None, None, numbers, numbers, True, 1e-5, asked)


def convolved(x: Tensor) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    return function(x, torch.ones(4, x.shape[1], *(3,) * (x.dim() - 2)), padding=1)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "convolution": convolved,
    "batch norm": lambda x: batch_norm(x, True),
    "batch norm, evaluated": lambda x: batch_norm(x, False),
    "batch norm, backward": batch_norm_backward,
    "group norm": lambda x: F.group_norm(x, 4),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "silu": F.silu,
    "sum": lambda x: x + x,
    "sum with contiguous": lambda x: x + x.contiguous(),
    "plus number": lambda x: x + 1,
    "number times": lambda x: 2 * x,
    "divided": lambda x: x / 3,
    "compared": lambda x: x > 0,
    "by channel": lambda x: x * torch.ones(x.shape[1], *(1,) * (x.dim() - 2)),
    "rolled": lambda x: x.roll(1, -1),
    "enlarged": lambda x: F.interpolate(x, scale_factor=2),
    "softmax": lambda x: x.softmax(1),
    "concatenated": lambda x: torch.cat([x, x], 1),
    "padded": lambda x: F.pad(x, (1, 1)),
    "converted": lambda x: x.double(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_strides_are_those_on_a_processor(function: str, form: str) -> None:
    x, call = FORMS[form](), FUNCTIONS[function]
    expected = [y for y in tree_leaves(call(x)) if isinstance(y, Tensor)]
    with ShapesOnly() as shapes:
        found = [y for y in tree_leaves(call(shapes.from_tensor(x))) if isinstance(y, Tensor)]
    described = [[(y.shape, y.stride(), y.dtype) for y in some if y.numel() > 1] for some in (found, expected)]
    assert described[0] == described[1]
