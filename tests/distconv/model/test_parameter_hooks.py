"""Hooks of parameters, and gradients of graphs that were made before the parameters were split, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def loss(net: nn.Module) -> Tensor:
    x = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    left, right = net(x)
    return left.square().mean() + right.square().mean()


def penalty(net: nn.Module) -> Tensor:
    total: Any = sum(parameter.pow(2).sum() for parameter in net.parameters())
    return 0.1 * total


def clamping(net: nn.Module, calls: list[Any]) -> None:
    def clamp(grad: Tensor) -> Tensor:
        calls.append(grad.norm())
        return grad.clamp(-0.01, 0.01)

    for parameter in net.parameters():
        parameter.register_hook(clamp)


def grads(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


def summed_once(net: nn.Module) -> list[Any]:
    calls: list[Any] = []
    clamping(net, calls)
    before = penalty(net)
    (loss(net) + before).backward(retain_graph=True)
    (loss(net) + 3 * before + penalty(net)).backward()
    return [len(calls), sum(calls), *grads(net)]


def each_alone(net: nn.Module) -> list[Any]:
    calls: list[Any] = []
    clamping(net, calls)
    before, later = penalty(net), loss(net)
    before.backward()
    later.backward()
    return [len(calls), sum(calls), *grads(net)]


def steps_in_backward(net: nn.Module) -> list[Any]:
    calls: list[Any] = []

    def step(parameter: Tensor) -> None:
        calls.append(parameter.grad.norm())  # type: ignore[union-attr]
        parameter.data.sub_(0.1 * parameter.grad)  # type: ignore[operator]
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = penalty(net)
    (loss(net) + before).backward()
    return [len(calls), sum(calls), loss(net)]


def asked_for(net: nn.Module) -> list[Any]:
    before = penalty(net)
    total, held = loss(net) + before, list(net.parameters())
    found = [
        *torch.autograd.grad(total, held, retain_graph=True),
        *torch.autograd.grad(before, held, retain_graph=True),
    ]
    calls: list[Any] = []
    clamping(net, calls)
    found += torch.autograd.grad(total, [*held[:2], held[0]], retain_graph=True)
    total.backward(inputs=held[2:3])
    return [len(calls), sum(calls), *found, held[2].grad, [parameter.grad is None for parameter in held]]


def unused(net: nn.Module) -> list[Any]:
    before, other = penalty(net), nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph") as raised:
        torch.autograd.grad(loss(net) + before, [*net.parameters(), other])
    return [str(raised.value)]


def second_derivatives(net: nn.Module) -> list[Any]:
    before = penalty(net)
    first = torch.autograd.grad(loss(net) + before, list(net.parameters()), create_graph=True)
    total: Any = sum(grad.pow(2).sum() for grad in first)
    total.backward()
    return grads(net)


def one_head(net: Any) -> list[Any]:
    """Parameters without a gradient: their hooks are not called."""
    calls: list[Any] = []
    clamping(net, calls)
    torch.autograd.graph.register_multi_grad_hook(
        list(net.parameters()), lambda found: calls.append(sum(grad is None for grad in found))
    )
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.norm()))
    for head in (0, 1):
        net(torch.ones(2, 3, 8, 6, dtype=torch.float64))[head].sum().backward()
    return [len(calls), sum(calls), *grads(net)]


USES = (summed_once, each_alone, steps_in_backward, asked_for, unused, second_derivatives, one_head)


def whole(value: Any) -> Any:
    return distconv.gather(value.detach()) if isinstance(value, Tensor) else value


def unlike(partition: str) -> dict[str, str]:
    """What of the uses gives other numbers than one process has."""
    mesh, found = distconv.init(partition, device_type="cpu"), {}
    for use in USES:
        expected = [*map(whole, use(Heads()))]
        with distconv.distributed_script(mesh):
            here = [*map(whole, use(Heads()))]
        for a, b in zip(expected, here, strict=True):
            if not torch.allclose(a, b, 1e-10, 1e-12) if isinstance(a, Tensor) else a != b:
                found[use.__name__] = f"{b}, not {a}"
    return found


def refused(partition: str) -> str:
    net, mesh = Heads(), distconv.init(partition, device_type="cpu")
    torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda grads: None)
    with distconv.distributed_script(mesh), pytest.raises(distconv.UnsupportedOperation) as caught:
        before = penalty(net)
        (loss(net) + before).backward()
    return str(caught.value)


def test_a_hook_of_several_with_an_earlier_graph_is_refused(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refused, "channel=2")
    assert first == second
    assert first.startswith("register_multi_grad_hook: a parameter ")


@pytest.mark.parametrize("partition", ["channel=2", "sample=2"])
def test_hooks_get_whole_gradients_once(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert ranks(2).run(unlike, partition) == [{}] * 2
