"""distconv, as docs/distconv.md tells to use it in a program."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import distconv
from distconv.rules import whole as small

WAYS = ("",)


def versions() -> dict[str, str]:
    return {"distconv": distconv.__version__, "torch": torch.__version__}


def begin() -> None:
    small.MOST_BYTES = 0  # the inputs stand for large ones, of which distconv gathers none


def compute(module: nn.Module, x: Tensor, grad: Tensor, partition: str, way: str) -> dict[str, Tensor | None]:
    mesh = distconv.init(partition, device_type="cpu")
    model = distconv.parallelize(module, mesh)
    x.requires_grad_()
    y = distconv.gather(model(distconv.shard(x, mesh)))
    y.backward(grad)
    gradients = {name: p.grad if p.grad is None else distconv.gather(p.grad) for name, p in model.named_parameters()}
    return {"output": y, "input": x.grad, **gradients}


def refused(error: Exception) -> bool:
    return isinstance(error, distconv.UnsupportedOperation)
