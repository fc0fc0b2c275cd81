"""Masks of positions in a model: parts make their own rows of them, and compute what one process does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import distconv
from distconv.tensors import deferred

X = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deferred may be as small as in these tests."""
    monkeypatch.setattr(deferred, "LEAST", 1 << 10)


class _Largest(TorchDispatchMode):
    """Keeps the most elements of a tensor that an operator has made of truths."""

    def __init__(self) -> None:
        super().__init__()
        self.truths = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | deferred.Deferred) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bool:
            self.truths = max(self.truths, result.numel())
        return result


class Attention(nn.Module):
    """Over all pixels, some of which see others by their positions."""

    def __init__(self, mask: Callable[[Tensor], Tensor], written_out: bool) -> None:
        super().__init__()
        self.qkv, self.mask, self.written_out = nn.Conv2d(4, 12, 1), mask, written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        mask = self.mask(torch.arange(x.shape[2:].numel(), dtype=torch.uint8))
        if not self.written_out:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        elif mask.dtype == torch.bool:
            y = (q @ k.transpose(-2, -1)).masked_fill(~mask, -math.inf).softmax(-1) @ v
        else:
            y = (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v
        return x + y[:, 0].transpose(1, 2).reshape(x.shape)


def causal(index: Tensor) -> Tensor:
    return index[:, None] >= index


def by_frames(index: Tensor) -> Tensor:
    """As of diffusers' HunyuanVideo."""
    x, y = torch.meshgrid(index // 64, index // 64, indexing="xy")
    mask = torch.where(x <= y, 0, -math.inf).to(dtype=torch.float64)
    return mask.unsqueeze(0).expand(2, -1, -1).repeat_interleave(1, dim=0).view(2, 1, -1, len(index))


def patched(index: Tensor) -> Tensor:
    mask = causal(index)
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
@pytest.mark.parametrize("mask", [causal, by_frames, patched])
@pytest.mark.parametrize("memory", [None, "2KiB"])
def test_parts_make_their_rows(mask: Callable[[Tensor], Tensor], written_out: bool, memory: str | None) -> None:
    plain = Attention(mask, written_out).double()
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4", memory=memory)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    with _Largest() as largest:
        y = turned(inputs[0])
    assert largest.truths <= 256 * 256 // 4 or mask is patched
    right = plain(inputs[1])
    torch.testing.assert_close(y, right, rtol=0, atol=1e-10)
    for result in (y, right):
        result.square().sum().backward()
    for one, other in zip((inputs[0], *turned.parameters()), (inputs[1], *plain.parameters()), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-9)
    with torch.inference_mode():
        torch.testing.assert_close(turned(X), plain(X), rtol=0, atol=1e-10)


def test_outside_of_a_call_all_is_computed_at_once() -> None:
    distconv.in_turn(nn.Conv2d(1, 1, 1), "height=2")
    index = torch.arange(256, dtype=torch.uint8)
    assert type(index[:, None] >= index) is Tensor
