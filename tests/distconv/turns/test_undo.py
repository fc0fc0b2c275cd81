"""A call that fails is undone, and made once more: all is as if the first one had not been."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.turns.computation import Undo
from mucudnn.devices.allocations import is_out_of_memory


class Changing(nn.Module):
    """Changes what a model can: buffers, parameters, attributes, containers, arrays, and random numbers."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(large))
        self.table, self.generator = np.zeros(4), torch.Generator().manual_seed(1)
        self.calls, self.past, self.cache, self.texts = 0, deque([1], 4), {"last": None}, bytearray(2)
        self.fails = False

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        self.calls += 1
        self.past.append(self.calls)
        self.cache["last"] = self.calls
        self.cache.pop("first", None)
        self.table += 1
        self.texts[0] += 1
        with torch.no_grad():
            self.conv.weight.data.clamp_(-0.1, 0.1)
            self.conv.bias.mul_(0.5)
            self.mean.data = self.mean * 0.5 + 1
            self.mean.add_(torch.rand(4, generator=self.generator))
            self.queue[1:3] = torch.rand(2) + random.random() + np.random.rand()
        if "scale" not in vars(self):
            self.scale = 0.0
        self.scale += float(self.mean.sum())
        y = self.drop(self.norm(self.conv(x)))
        cache.append(y.detach() * 1)
        if self.fails:
            raise MemoryError
        return y * self.scale


def state(model: Changing, cache: list[Tensor], *more: Any) -> list[Any]:
    drawn = torch.rand(2), random.random(), np.random.rand(2), torch.rand(2, generator=model.generator)
    own = (model.calls, list(model.past), model.cache, model.texts, model.table, vars(model).get("scale"))
    versions = [x._version for x in (model.conv.weight, model.conv.bias, model.mean, model.queue)]
    return [*model.state_dict().values(), *drawn, *own, *cache, versions, *more]


def same(found: list[Any], right: list[Any]) -> bool:
    return len(found) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else bool(np.all(a == b)) for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("turned", [False, True])
def test_a_call_that_failed_and_was_undone_has_not_been(turned: bool) -> None:
    torch.manual_seed(0)
    x, found = torch.randn(2, 2, 8, 6, dtype=torch.float64), []
    for fails in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model, cache = Changing(1 << 8 if turned else 1 << 18).double(), []
        places = model.mean, model.cache, model.past, model.table, model.conv.weight
        if turned:
            distconv.in_turn(model, "height=2")
        model(x, cache)
        if fails:
            begun = Undo(model, ((x, cache), {}))
            model.fails = True
            with pytest.raises(MemoryError), begun.watch():
                model(x, cache)
            assert begun.put_back() is None
            model.fails = False
        y = model(x, cache)
        y.sum().backward()
        found.append(state(model, cache, y, model.conv.weight.grad))
        now = model.mean, model.cache, model.past, model.table, model.conv.weight
        assert all(a is b for a, b in zip(places, now, strict=True))
    assert same(*found)


class Unseen(nn.Module):
    """Changes what is not put back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what, self.ids = nn.Conv2d(1, 1, 1), what, None
        self.memory = self.conv.weight.detach().numpy()
        self.large = np.zeros(1 << 18)
        if what == "ids":
            self.ids = itertools.count()

    def forward(self, x: Tensor) -> None:
        if self.what == "memory":
            self.memory += 1
        elif self.what == "large":
            self.large[: 1 << 17] += 1


@pytest.mark.parametrize(
    ("what", "name"), [("memory", "conv.weight"), ("large", "Unseen.large"), ("ids", "Unseen.ids"), ("nothing", None)]
)
def test_what_cannot_be_put_back_is_named(what: str, name: str | None) -> None:
    model = Unseen(what)
    begun = Undo(model)
    with begun.watch():
        model(torch.ones(1, 1, 2, 2))
    assert begun.put_back() == name


def test_errors_of_used_up_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert (
        is_out_of_memory(raised.value)
        and is_out_of_memory(torch.OutOfMemoryError())
        and is_out_of_memory(MemoryError())
    )
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(KeyError("std::bad_alloc"))
