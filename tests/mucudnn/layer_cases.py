"""Layers of every kind, and what is compared of them: the output and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1-D": (lambda: nn.Conv1d(3, 4, 5), (4, 3, 20)),
    "2-D": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 3, 9, 8)),
    "3-D": (lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 5, 6, 7)),
    "no bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (3, 3, 9, 8)),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=(2, 3), padding=1), (3, 3, 12, 11)),
    "dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 3), padding=2), (3, 3, 12, 11)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (3, 4, 7, 8)),
    "even kernel": (lambda: nn.Conv2d(3, 4, (4, 2), padding=(1, 0)), (3, 3, 9, 8)),
    "1x1": (lambda: nn.Conv2d(3, 4, 1), (3, 3, 5, 4)),
    "over-padded": (lambda: nn.Conv1d(3, 4, 3, padding=5), (3, 3, 4)),
    "same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same"), (3, 3, 9, 8)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (3, 3, 9, 8)),
    "replicate": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="replicate"), (3, 3, 9, 8)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular"), (3, 3, 9, 8)),
    "unbatched": (lambda: nn.Conv2d(3, 4, 3), (3, 9, 8)),
    "one sample": (lambda: nn.Conv2d(3, 4, 3), (1, 3, 9, 8)),
    "transposed 1-D": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2), (4, 3, 9)),
    "transposed 2-D": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 3, 6, 7)),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 4, 5)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, output_padding=1), (3, 4, 6, 7)),
}


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and every gradient, for a loss that weighs all outputs differently."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    output = module(x)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **gradients}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].stride() == tensor.stride(), name
        error = (actual[name] - tensor).norm() / tensor.norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error}"
