"""Gradients of gradients: penalties on the gradient of a whole input or of the parameters, as one process has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo


def convolutions(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *layers, nn.Conv2d(8, 3, 3, stride=2, padding=1))


def critic(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), norm, nn.LeakyReLU(0.2), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


class OwnAttention(nn.Module):
    """Queries and keys of the channels at all positions, written out."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return (torch.softmax(tokens @ tokens.transpose(1, 2) / 4, -1) @ tokens).transpose(1, 2).reshape(x.shape)


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: critic(nn.Identity()),
    "linear, batch norm": lambda: critic(nn.BatchNorm1d(8)),
    "linear, layer norm": lambda: critic(nn.LayerNorm(8)),
    "flattened": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(180, 1)),
    "groups, transposed": lambda: convolutions(nn.Conv2d(8, 8, 3, groups=4), nn.ELU(), nn.ConvTranspose2d(8, 8, 4, 2)),
    "batch norm": lambda: convolutions(nn.BatchNorm2d(8), nn.Tanh()),
    "group and instance norm": lambda: convolutions(nn.GroupNorm(2, 8), nn.Tanh(), nn.InstanceNorm2d(8, affine=True)),
    "pooling": lambda: convolutions(nn.Tanh(), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(3)),
    "resized": lambda: convolutions(nn.Softplus(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PReLU(8)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3, padding=1)),
    "circular, attention": lambda: convolutions(
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.Sigmoid(), OwnAttention()
    ),
}


def interpolated(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP: the norm of the gradient between real and fake is to be one."""
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    score = net(between)
    (grad,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    return net(fake).mean() - net(real).mean() + 10 * (grad.flatten(1).norm(2, 1) - 1).square().mean()


def of_parameters(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The sum of squares of the gradients of all parameters."""
    loss = net(real).square().mean()
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


def numbers(net: nn.Module, penalty: Any) -> list[Tensor]:
    """The loss, the gradients of the parameters, and the loss after a step by them."""
    generator = torch.Generator().manual_seed(2)
    shape = (4, 12) if isinstance(net[0] if isinstance(net, nn.Sequential) else net, nn.Linear) else (4, 4, 6, 5)
    real, fake = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = penalty(net, real, fake)
    loss.backward()
    found = [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters())]
    torch.optim.SGD(net.parameters(), lr=1e-3).step()
    return [*(distconv.whole_state(found)), distconv.gather(penalty(net, real, fake).detach())]


def worst(partition: str) -> dict[str, float]:
    """The largest error of each network and penalty, relative to the largest number of its tensor."""
    mesh, errors = distconv.init(partition, device_type="cpu"), {}
    for name, make in NETS.items():
        for penalty in (interpolated, of_parameters):
            both = []
            for alone in (True, False):
                torch.manual_seed(1)
                net = make().double()
                both.append(numbers(net if alone else distconv.parallelize(net, mesh), penalty))
            errors[f"{name}: {penalty.__name__}"] = max(
                float((a - b).abs().max() / (a.abs().max() + 1e-3)) for a, b in zip(*both, strict=True)
            )
    return {name: error for name, error in errors.items() if not error < 1e-9}


@pytest.mark.parametrize("partition", ["sample=2,channel=2", "sample=2,height=2", "channel=2,filter=2"])
def test_penalties_equal_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert ranks(4).run(worst, partition) == [{}] * 4
