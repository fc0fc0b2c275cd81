"""What stock torch computes of a layer in one process."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from benchmarks.conformance.cases import Layer
from benchmarks.conformance.layers import build


class Reference:
    """A layer's parameters, its input, the gradient that its output gets, and the numbers of one process."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        torch.manual_seed(zlib.crc32(layer.name.encode()))
        module = build(layer)
        x = torch.randn(layer.shape, dtype=torch.float64, requires_grad=True)
        y = module(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        self.given = {"input": x, "grad": grad} | {f"parameter {n}": p for n, p in module.named_parameters()}
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        self.expected = _arrays({"output": y, "input": x.grad, **gradients})
        self.given = _arrays(self.given)


def _arrays(tensors: dict[str, torch.Tensor | None]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items() if tensor is not None}
