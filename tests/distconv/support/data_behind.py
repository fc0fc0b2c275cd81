"""A model whose buffers and weight get other data behind their use: in forward, before backward, and within it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class ReadsBuffers(nn.Module):
    """Reads buffers as numbers for each channel, a weight, and statistics; its norm is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.register_buffer("factor", torch.rand(4, 1, 1) + 0.5)
        self.register_buffer("grid", torch.rand(1, 4, 8, 8) + 0.5)
        self.register_buffer("weight", torch.rand(4, 4, 3, 3))
        self.register_buffer("scale", torch.rand(4))
        self.binary = nn.Conv2d(4, 4, 3, padding=1)
        self.binary.register_forward_pre_hook(_binarize)
        self.binary.register_full_backward_hook(_restore)
        self.binary.register_full_backward_hook(self._grow)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.norm, self.conv(x) * self.factor * self.grid, use_reentrant=True)
        self.factor.data = self.factor.data * 0.5 + 0.1
        y = self.binary(y * self.factor)
        return functional.group_norm(functional.conv2d(y, self.weight, padding=1), 2, self.scale)

    def _grow(self, *_: Any) -> None:
        self.factor.data.mul_(1.5)


def _binarize(layer: Any, *_: Any) -> None:
    layer.latent = layer.weight.data.clone()
    layer.weight.data = layer.weight.data.sign() * 0.1


def _restore(layer: Any, *_: Any) -> None:
    layer.weight.data = layer.latent


def gradients(prepare: Callable[[nn.Module], object] = lambda _: None) -> dict[str, Tensor]:
    """Of two evaluations, whose buffers have other data since when backward runs."""
    model = ReadsBuffers().eval()
    prepare(model)
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    losses = [model(x * factor).square().mean() for factor in (1.0, 2.0)]
    for loss, factor in zip(losses, (0.5, 3.0), strict=True):
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.transpose(-1, -2).contiguous() * factor if name == "grid" else buffer * factor
        loss.backward(retain_graph=True)
        loss.backward()
    return {"input": x.grad} | {name: p.grad for name, p in model.named_parameters()}  # type: ignore[dict-item]
