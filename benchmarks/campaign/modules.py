"""What torch has no module for, among the layers that networks of the campaign are drawn from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def divisor(wanted: int, *numbers: int) -> int:
    """The largest number up to the wanted one that divides all numbers."""
    return next(n for n in range(max(wanted, 1), 0, -1) if all(number % n == 0 for number in numbers))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


def _shuffled(x: Tensor) -> Tensor:
    groups = divisor(2, x.shape[1])
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return parts.transpose(1, 2).reshape(x.shape)


def _excited(x: Tensor) -> Tensor:
    return x * x.mean(tuple(range(2, x.dim())), keepdim=True).sigmoid()


def _in_place(x: Tensor) -> Tensor:
    x = x * 1.25
    x += 0.1
    return x.mul_(0.5).tanh_()


def _written(x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, :, 0] = 0.5
    return x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, 2),
    "slice": lambda x: x[:, :, 1:],
    "every second": lambda x: x[..., ::2],
    "transpose": lambda x: x.transpose(2, -1),
    "center": lambda x: x - x.mean(dim=(0, 2), keepdim=True),
    "scale": lambda x: x / (1 + x.abs().amax(dim=1, keepdim=True)),
    "std": lambda x: x / (1 + x.std(dim=tuple(range(1, x.dim())), keepdim=True, unbiased=False)),
    "excite": _excited,
    "channel shuffle": _shuffled,
    "halves swapped": lambda x: torch.cat(x.tensor_split(2, dim=1)[::-1], 1),
    "stacked": lambda x: torch.stack((x, -x), 2).flatten(1, 2),
    "max of halves": lambda x: torch.maximum(x, x.flip(2)),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "cumsum": lambda x: x.cumsum(2) / x.shape[2],
    "in place": _in_place,
    "written": _written,
    "clone": lambda x: x.clone().contiguous(),
    "row sum": lambda x: x + x.sum(-1, keepdim=True) / x.shape[-1],
    "rotated": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


class Attention(nn.Module):
    """Self-attention over all positions, the channels being the features."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.together = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        samples, count, channels = tokens.shape
        q, k, v = (
            part.reshape(samples, count, self.heads, channels // self.heads).transpose(1, 2)
            for part in self.together(tokens).chunk(3, -1)
        )
        met = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, count, channels)
        return x + self.out(met).transpose(1, 2).reshape(x.shape)
