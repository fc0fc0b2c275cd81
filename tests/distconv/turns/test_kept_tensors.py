"""What calls keep of tensors that a model has replaced, and of calls that are over: nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv
from distconv.turns import call


class Keeping(nn.Module):
    """Keeps a tensor that it makes anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.grid = nn.Conv2d(1, 1, 3, padding=1), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.grid = torch.arange(1 << 16, dtype=torch.float64).view(1, 1, 256, 256)
        return self.layer(x) + self.grid.mean()


def test_what_a_model_has_replaced_is_gone_in_backward() -> None:
    model, x = distconv.in_turn(Keeping().double(), "height=2"), torch.randn(1, 1, 256, 256).double()
    model(x).sum().backward()
    before = weakref.ref(model.grid)
    y = model(x)
    gone = []
    y.register_hook(lambda grad: gone.append(before() is None))
    model.layer.weight.register_hook(lambda grad: gone.append(before() is None))
    y.sum().backward()
    assert gone[-1]


class Cache(nn.Module):
    """Replaces a tensor in a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)
        self.freed: list[bool] = []

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        before = weakref.ref(cache[0])
        cache[0] = x + 1
        self.freed.append(before() is None)
        return self.layer(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Cache()

    def forward(self, x: Tensor) -> Tensor:
        cache = [x * 2]
        return self.inner(x, cache) + cache[0]


def test_a_tensor_that_a_module_replaces_in_a_list_is_free() -> None:
    distconv.fit(nn.Linear(1, 1), "1GiB")  # Calls of all modules pass through distconv from now on.
    model = Outer()
    model(torch.randn(1, 1, 8, 8))
    assert model.inner.freed and all(model.inner.freed)


def test_a_call_is_gone_without_a_collection_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    init = call._Call.__init__

    def noted(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(call._Call, "__init__", noted)
    model, x = distconv.in_turn(Keeping().double(), "height=2"), torch.randn(1, 1, 256, 256).double()
    gc.disable()
    try:
        model(x).sum().backward()
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


class KeepingTwo(nn.Module):
    """Keeps a tensor that it makes anew in each call, and the one before in two other places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.grid, self.cache = nn.Conv2d(1, 1, 3, padding=1), torch.zeros(1 << 16).double(), {}
        self.before = self.grid

    def forward(self, x: Tensor) -> Tensor:
        self.before, self.cache["before"], self.grid = self.grid, self.grid, self.grid + 1
        return checkpoint(self.weighted, x, use_reentrant=False)

    def weighted(self, x: Tensor) -> Tensor:
        return self.layer(x * (1 + self.before.mean() + self.cache["before"].mean()))


def test_what_another_place_has_stays() -> None:
    torch.manual_seed(0)
    plain, x = KeepingTwo().double(), torch.randn(1, 1, 64, 64).double()
    turned = distconv.in_turn(copy.deepcopy(plain), "height=2")
    for _ in range(3):
        for model in (plain, turned):
            model(x).square().sum().backward()
        assert torch.equal(turned.before, plain.before) and torch.equal(turned.cache["before"], plain.before)
        torch.testing.assert_close(turned.layer.weight.grad, plain.layer.weight.grad)
