"""What tests of torch.compile share: networks of known numbers, a compiler that knows of none, steps of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import distconv


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def steps(model: Any, plain: nn.Module, train: int = 3) -> dict[str, Tensor]:
    """What some steps of training give, and one evaluation after them."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(train):
        generator = torch.Generator().manual_seed(step)
        x, targets = torch.randn(5, 4, 9, 8, generator=generator).double(), torch.arange(5) % 4
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()
        found[f"loss {step}"] = torch.tensor(loss.item())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} of {name}"] = distconv.whole_state(parameter.grad).clone()
        optimizer.step()
    for name, buffer in plain.named_buffers():
        found[f"buffer {name}"] = distconv.whole_state(buffer).clone()
    plain.eval()
    with torch.no_grad():
        found["evaluation"] = distconv.gather(model(x)).clone()
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors that are not below 1e-10; one of all where names differ."""
    if found.keys() != expected.keys():
        return {str(found.keys() ^ expected.keys()): float("inf")}
    errors = {
        name: float((found[name] - right).abs().max() / right.abs().max().clamp(min=1e-3))
        for name, right in expected.items()
    }
    return {name: error for name, error in errors.items() if not error <= 1e-10}
