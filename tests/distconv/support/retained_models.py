"""Models whose segments give something up for backward in many ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint


def block(channels: int = 4, inplace: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace), nn.Dropout(0.3)
    )


class Residual(nn.Module):
    """Its blocks are added to what they are given, in place or not; one of them is called twice."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self.inplace = block(), block(), inplace
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(self.second(x))
        if self.inplace:
            y += x
        else:
            y = y + x
        return self.head(y)


class Skips(nn.Module):
    """A U-Net of two levels; its decoder has a keyword, and gives a dict."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.conv = nn.ConvTranspose2d(4, 4, 2, stride=2), spectral_norm(nn.Conv2d(8, 4, 3, padding=1))

        def forward(self, deep: Tensor, *, skip: Tensor) -> dict[str, Any]:
            y = torch.cat([self.up(deep), skip], dim=1)
            return {"y": torch.tanh(self.conv(y)), "more": (y, None)}

    def __init__(self) -> None:
        super().__init__()
        self.top, self.deep, self.decoder = block(), block(), self.Decoder()

    def forward(self, x: Tensor) -> Tensor:
        skip = self.top(x)
        found = self.decoder(self.deep(nn.functional.max_pool2d(skip, 2)), skip=skip)
        return found["y"] * found["more"][0].mean()


class Impure(nn.Module):
    """Modules that a second forward would change: a counter, Python's random numbers, a parameter."""

    class Counted(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.sigmoid(x * x) * self.calls

    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x * x) * (random.random() + numpy.random.rand())

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.ones(4, 1, 1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean((0, 2, 3))[:, None, None])
            return torch.sigmoid(x * x) - self.mean

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.Counted(), self.Drawn(), self.Centred(), nn.Conv2d(4, 4, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Checkpointed(nn.Module):
    """Has checkpoints of its own, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = block(inplace=False), block(inplace=False), block()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.third(checkpoint(self.second, x, use_reentrant=True))


class Mixed(nn.Module):
    """A convolution under autocast, attention, and an input that asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = self.frozen(torch.relu(self.stem(x)))
        return self.layer(y.flatten(2).transpose(1, 2).to(x.dtype))


class Scale(torch.autograd.Function):
    """Keeps for backward what nothing else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * 2 * y * y * (1 - y)


class Scales(nn.Module):
    """Calls a function of its own before each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(Scale.apply(x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in a row": lambda: nn.Sequential(block(), block(), nn.Sequential(block(), nn.Flatten()), nn.Linear(576, 3)),
    "residual": lambda: Residual(False),
    "residual in place": lambda: Residual(True),
    "skips": Skips,
    "impure": Impure,
    "own checkpoints": Checkpointed,
    "mixed": Mixed,
    "own function": Scales,
    "noise that is saved first": lambda: nn.Sequential(
        block(), nn.Sequential(nn.RReLU(), block()), block(), nn.RReLU()
    ),
}
