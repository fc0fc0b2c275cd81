"""The layers of the cases as torch's modules, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.conformance.cases import Layer, Shape


class Attention(nn.Module):
    """Self-attention over all positions of a map, the channels being the features, in products and a softmax."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        samples, count, channels = tokens.shape
        q, k, v = (
            project(tokens).reshape(samples, count, self.heads, channels // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        weights = functional.softmax(q @ k.transpose(-2, -1) / (channels // self.heads) ** 0.5, -1)
        met = (weights @ v).transpose(1, 2).reshape(samples, count, channels)
        return self.out(met).transpose(1, 2).reshape(x.shape)


class LayerNorm(nn.Module):
    """Layer norm of the channels of a map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """ResNet-18's basic block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return functional.relu(self.last_norm(self.second(y)) + x)


def build(layer: Layer) -> nn.Module:
    """The module of a layer; its parameters are drawn after torch's seed, those of norms too."""
    module = _BUILDERS[layer.kind](layer.shape, **layer.options).double()
    for parameter in module.parameters():
        if parameter.dim() == 1:  # ones and zeros would hide what is done to them
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def _dims(name: str, shape: Shape) -> Any:
    return getattr(nn, f"{name}{len(shape) - 2}d")


def _convolution(
    shape: Shape, filters: int, kernel: Any, groups: int = 1, mode: str = "zeros", **sizes: Any
) -> nn.Module:
    sizes.pop("output_padding")
    return _dims("Conv", shape)(shape[1], filters, kernel, groups=groups, padding_mode=mode, **sizes)


def _transposed(shape: Shape, filters: int, kernel: Any, groups: int = 1, **sizes: Any) -> nn.Module:
    return _dims("ConvTranspose", shape)(shape[1], filters, kernel, groups=groups, **sizes)


def _pool(shape: Shape, of: str, kernel: Any, stride: Any, padding: Any, dilation: Any, **more: Any) -> nn.Module:
    if of == "max":
        ceil = more.get("ceil", False)
        return _dims("MaxPool", shape)(kernel, stride, padding, dilation, ceil_mode=ceil)
    counts = more.get("counts_padding", True)
    return _dims("AvgPool", shape)(kernel, stride, padding, count_include_pad=counts)


def _adaptive(shape: Shape, of: str, size: Any) -> nn.Module:
    return _dims("AdaptiveMaxPool" if of == "max" else "AdaptiveAvgPool", shape)(size)


def _norm(shape: Shape, of: str) -> nn.Module:
    channels = shape[1]
    if of == "group":
        return nn.GroupNorm(4, channels)
    if of == "layer":
        return LayerNorm(channels)
    return nn.BatchNorm2d(channels) if of == "batch" else nn.InstanceNorm2d(channels, affine=True)


def _resize(shape: Shape, mode: str, size: Any, corners: bool) -> nn.Module:
    return nn.Upsample(size, mode=mode, align_corners=None if mode == "nearest" else corners)


def _head(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), classes))


_BUILDERS: dict[str, Any] = {
    "convolution": _convolution,
    "transposed": _transposed,
    "pool": _pool,
    "adaptive": _adaptive,
    "norm": _norm,
    "resize": _resize,
    "shuffle": lambda shape, factor: nn.PixelShuffle(factor),
    "softmax": lambda shape, dim: nn.Softmax(dim),
    "attention": lambda shape, heads: Attention(shape[1], heads),
    "block": lambda shape: Block(shape[1]),
    "head": _head,
}
