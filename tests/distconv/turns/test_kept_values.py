"""Values that a model keeps in tuples, in functions that remember results, and behind weak references."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv

Scale = namedtuple("Scale", "factor offset")


@functools.lru_cache(maxsize=8)
def ramp(rows: int, columns: int) -> Tensor:
    return torch.linspace(0, 1, rows, dtype=torch.float64)[:, None].expand(rows, columns)


class Layer(nn.Module):
    """Scales by what it keeps, in one of these ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind, self.kept = nn.Conv2d(4, 4, 3, padding=1), kind, None
        factor, offset = torch.full((4, 1, 1), 0.5), torch.full((4, 1, 1), 0.1)
        self.scale: Any = (factor, offset) if kind == "a tuple" else Scale(factor, (offset, [0.2]))
        self.others = [nn.Conv2d(4, 4, 1)]  # which is not registered
        self.other = weakref.ref(self.others[0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.kind == "a tuple":
            return torch.sigmoid(y) * self.scale[0] + self.scale[1]
        if self.kind == "a tuple that is replaced":
            y = y + (0 if self.kept is None else self.kept[0])
            self.kept = y, torch.sigmoid(y).mean()
            return y * self.kept[1]
        if self.kind == "a tuple with a list":
            offset, numbers = self.scale.offset
            numbers.append(0.1)
            return torch.sigmoid(y) * self.scale.factor + offset + sum(numbers)
        if self.kind == "a function that remembers":
            return torch.sigmoid(y) * ramp(*x.shape[-2:])
        return torch.sigmoid(y) + self.other()(x)


KINDS = [
    "a tuple",
    "a tuple that is replaced",
    "a tuple with a list",
    "a function that remembers",
    "a weak reference",
]


def trained(kind: str, within: Callable[[nn.Module], nn.Module]) -> list[Any]:
    """Losses, gradients and what the layers keep, of two steps; of the second one, two calls."""
    ramp.cache_clear()
    torch.manual_seed(0)
    layers = [Layer(kind) for _ in range(4)]
    for layer in layers:
        layer.others[0].double()
        layer.scale = torch.utils._pytree.tree_map_only(Tensor, Tensor.double, layer.scale)
    net, found = within(nn.Sequential(nn.Conv2d(3, 4, 1), *layers).double()), list[Any]()
    for calls in (1, 2):
        for layer in layers:
            layer.kept = None
        x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
        loss = sum(net(x * (1 + n)).square().mean() for n in range(calls))
        found += [loss, *torch.autograd.grad(loss, [*net.parameters()])]
        found += [torch.utils._pytree.tree_leaves((layer.scale, layer.kept)) for layer in layers]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("within", ["height=2", "sample=2,width=2", "300KiB", "150KiB"])
def test_what_a_model_keeps_is_that_of_one_process(kind: str, within: str, capsys: pytest.CaptureFixture[str]) -> None:
    def limited(net: nn.Module) -> nn.Module:
        return distconv.in_turn(net, within, memory="40KiB") if "=" in within else distconv.fit(net, within)

    searched = kind == "a function that remembers"
    if searched:
        gc.unfreeze()  # the tests' own freezing hides functions from a search
    try:
        expected, found = trained(kind, lambda net: net), trained(kind, limited)
    finally:
        if searched:
            gc.freeze()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert "cannot be followed" not in capsys.readouterr().err
