"""Transforms of functions that call a model, and dual numbers: as in one process, with and without sharded weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd import functional as of_autograd
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import distconv
from distconv.model.parallelize import distributed_script

pytestmark = pytest.mark.gloo


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


Net = Callable[..., Any]


def penalized(net: nn.Module, x: Tensor) -> Any:
    """The gradients of parameters by a loss that has a Jacobian in it."""
    jacobian = torch.func.jacrev(lambda image: net(image[None])[0])(x[0])
    return torch.autograd.grad(jacobian.square().sum() + net(x).square().mean(), list(net.parameters()))


class Steps(nn.Module):
    """What the first layers make, what the others make of it, and both once more, changed."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        middle = self.net[:2](x)
        y = self.net[2:](middle)
        return middle, y, middle.flatten(1) * 2, y.sum(1)


def of_results(net: nn.Sequential, x: Tensor) -> Any:
    """The gradients of parameters by the gradients of results of a model by others, and by what is made of both."""
    middle, y, flat, total = Steps(net)(x)
    by_middle, by_y = torch.autograd.grad(
        total.square().sum() + (middle * flat.sum()).sum(), (middle, y), create_graph=True
    )
    loss = by_middle.square().sum() + by_y.square().mean() + y.mean()
    return [by_middle.detach(), by_y.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def clipped(net: nn.Module, x: Tensor) -> Any:
    """The weights after a step by gradients of single samples, clipped."""

    def loss(weights: Any, image: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, (image[None],)).square().sum()

    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for name, parameter in net.named_parameters():
        parameter.grad = each[name].clamp(-0.1, 0.1).mean(0)
    torch.optim.SGD(net.parameters(), 0.1, momentum=0.9).step()
    return [parameter.detach() for parameter in net.parameters()]


def adapted(net: nn.Module, x: Tensor) -> Any:
    """The gradients that a step's results give the parameters before it. A model's own parameters, sharded within its
    first call, are put back by ``functional_call`` as they were before.
    """
    start = dict(net.named_parameters())
    first = torch.func.functional_call(net, start, (x,)).square().mean()
    steps = torch.autograd.grad(first, list(start.values()), create_graph=True)
    after = {name: parameter - 0.1 * step for (name, parameter), step in zip(start.items(), steps, strict=True)}
    torch.func.functional_call(net, after, (x,)).square().sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return found


def dual(net: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.cos()))).tangent


def linearized(net: nn.Module, x: Tensor) -> Any:
    return torch.func.linearize(net, x)[1](x.cos())


def batched(net: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net(x), x, torch.eye(12).view(12, 4, 3).double(), is_grads_batched=True)


def by_weights(net: nn.Module, x: Tensor) -> Any:
    """The gradients by the weights that the model has now; as the first use of those that `adapted` has put back."""

    def loss(weights: Any) -> Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().sum()

    return torch.func.grad(loss)(dict(net.named_parameters()))


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "inner step": adapted,
    "parameters of parameters": lambda net, x: [nn.Parameter(parameter) for parameter in net.parameters()],
    "by weights": by_weights,
    "vmap": lambda net, x: torch.vmap(lambda image: net(image[None]))(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x.cos(),)),
    "vjp": lambda net, x: torch.func.vjp(net, x)[1](torch.ones(4, 3).double()),
    "jacfwd": lambda net, x: torch.func.jacfwd(net)(x[:1]),
    "hessian": lambda net, x: torch.func.hessian(lambda image: net(image).square().sum())(x[:1, :, :3, :3]),
    "linearize": linearized,
    "dual numbers": dual,
    "batch of gradients": batched,
    "vectorized Jacobian": lambda net, x: of_autograd.jacobian(net, x[:1], vectorize=True),
    "penalty": penalized,
    "gradients of results": of_results,
    "gradients of large results": lambda net, x: of_results(net, x.repeat(1, 1, 8, 8)),
    "gradients of samples": clipped,
}


def results(partition: str | None, called_before: bool) -> list[list[Tensor]]:
    """What each way gives; ``called_before``: after a step, from which on split channels shard the parameters."""
    torch.manual_seed(3)
    net, x = layers().double(), torch.randn(4, 1, 8, 6).double()
    if partition is None:
        script: Any = contextlib.nullcontext()
    else:
        script = distributed_script(distconv.init(partition, device_type="cpu"))
    with script:
        if called_before:
            F.mse_loss(net(x), torch.zeros(4, 3).double()).backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
        found = [tree_leaves(way(net, x)) for way in WAYS.values()]
    return [distconv.whole_state([y.detach() for y in each]) for each in found]


in_one_process = functools.cache(functools.partial(results, None))


@pytest.mark.parametrize(
    ("partition", "called_before"), [("height=2", False), ("channel=2", False), ("channel=2", True)]
)
def test_transforms_equal_one_process(ranks: Callable[[int], Ranks], partition: str, called_before: bool) -> None:
    for found in ranks(2).run(results, partition, called_before):
        torch.testing.assert_close(
            dict(zip(WAYS, found, strict=True)),
            dict(zip(WAYS, in_one_process(called_before), strict=True)),
            rtol=1e-9,
            atol=1e-11,
        )
