"""Parameters that a model uses and that are none of its own have the gradients of one process, in parts and limits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import random
from torch import Tensor, nn
from torch.nn import functional

import distconv

GLOBAL = nn.Parameter(random(4, 4, 3, 3))


class Borrows(nn.Module):
    """A layer of its own, and a weight of elsewhere."""

    in_class = nn.Parameter(random(4, 4, 3, 3, seed=1))

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.how = nn.Conv2d(4, 4, 1, dtype=torch.float64), how
        other = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
        self.listed, self.named = [other], {"weight": other.weight}
        self.closed = lambda: other.weight
        object.__setattr__(self, "hidden", other)

    def weights(self) -> dict[str, Callable[[], Any]]:
        return {
            "a list": lambda: self.listed[0].weight,
            "a dict": lambda: self.named["weight"],
            "a closure": self.closed,
            "a hidden module": lambda: self.hidden.weight,
            "a global variable": lambda: GLOBAL,
            "a class": lambda: self.in_class,
        }

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        if self.how == "a call":
            return self.listed[0](x).relu()  # type: ignore[no-any-return]
        return functional.conv2d(x, self.weights()[self.how](), padding=1).relu()


KINDS = ["a list", "a dict", "a closure", "a hidden module", "a global variable", "a class", "a call"]


def trained(how: str, given: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """The gradients of two calls together, and what autograd finds when it is asked for one of them."""
    net: Any = given(Borrows(how))
    weight = net.listed[0].weight if how == "a call" else net.weights()[how]()
    weight.grad = None
    calls: list[int] = []
    handle = weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for seed in range(2):
        net(random(2, 4, 16, 6, seed=seed)).square().sum().backward()
    (asked,) = torch.autograd.grad(net(random(2, 4, 16, 6)).sum(), weight)
    handle.remove()
    return [weight.grad.clone(), asked, net.own.weight.grad, torch.tensor(len(calls))]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "four parts": lambda net: distconv.in_turn(net, "height=4"),
    "three parts that offload": lambda net: distconv.in_turn(net, "height=3", memory=2048),
    "within a limit": lambda net: distconv.fit(net, "20KiB"),
    "a limit that suffices": lambda net: distconv.fit(net, "1GiB"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", KINDS)
def test_gradients_of_parameters_of_elsewhere(how: str, way: str) -> None:
    expected = trained(how, lambda net: net)
    for found, value in zip(trained(how, WAYS[way]), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


class Features(nn.Module):
    """Returns what it computes its result from, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.first(x).relu()
        result = self.last(features)
        return result, features, x * 2.0


ASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_grad": lambda y, x: x.retain_grad(),
    "register_hook": lambda y, x: x.register_hook(lambda grad: grad),
    "grad": lambda y, x: torch.autograd.grad(y.sum(), x, allow_unused=True),
    "backward": lambda y, x: torch.autograd.backward(y.sum(), inputs=[x]),
}


@pytest.mark.parametrize("how", ASKED)
def test_the_gradient_of_a_result_that_others_depend_on_is_refused(how: str) -> None:
    net = distconv.in_turn(Features(), "height=4")
    x = torch.randn(2, 3, 16, 6, requires_grad=True)
    y, features, twice = net(x)
    with pytest.raises(distconv.UnsupportedOperation, match=r"of result 2 of a call.*accepted: without parts"):
        ASKED[how](y, features)
    twice.retain_grad()  # on which no other result depends
    (y.sum() + twice.sum()).backward()
    assert torch.equal(twice.grad, torch.ones_like(twice))


class Asks(nn.Module):
    """Asks for the gradient by a weight from which its input was computed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.own, self.kept = nn.Conv2d(2, 2, 1), [weight]

    def forward(self, y: Tensor) -> Tensor:
        loss: Tensor = self.own(y).square().mean()
        try:
            (grad,) = torch.autograd.grad(loss, self.kept[0], retain_graph=True)
        except RuntimeError:
            return loss
        return loss * grad.norm().detach()


def test_a_gradient_from_before_the_call_is_refused_even_if_the_model_goes_on() -> None:
    net = nn.Conv2d(3, 2, 3, padding=1)
    asks = distconv.in_turn(Asks(net.weight), "height=2")
    with pytest.raises(distconv.UnsupportedOperation, match="from which its inputs were computed before"):
        asks(net(torch.randn(2, 3, 8, 8)))
    plain = Asks(net.weight)
    fitted, x = distconv.fit(copy.deepcopy(plain), "2KiB"), torch.randn(2, 3, 8, 8)
    fitted.kept[0] = net.weight
    fitted.own.load_state_dict(plain.own.state_dict())
    torch.testing.assert_close(fitted(net(x)), plain(net(x)))
