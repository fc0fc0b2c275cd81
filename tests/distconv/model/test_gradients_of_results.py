"""The gradient of a model's result has all that reaches it, also by way of the model's other results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from reference import random
from torch import Tensor, nn

import distconv
from distconv.model import running

pytestmark = pytest.mark.gloo


class Features(nn.Module):
    """Returns what it computes its result from, too."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.body(features), features


def retained(net: Features, loss: Tensor, features: Tensor) -> Any:
    features.retain_grad()
    loss.backward()
    return features.grad


def hooked(net: Features, loss: Tensor, features: Tensor) -> Any:
    seen: list[Tensor] = []
    features.register_hook(lambda grad: seen.append(grad * 1.0))
    handle = features.register_hook(lambda grad: grad * 0.5)
    features.register_hook(lambda grad: grad * 100.0).remove()
    loss.backward()
    handle.remove()
    return [*seen, *(p.grad for p in net.parameters())]


def retained_behind_a_hook(net: Features, loss: Tensor, features: Tensor) -> Any:
    features.retain_grad()
    features.register_hook(lambda grad: grad + 1.0)
    loss.backward()
    return [features.grad, *(p.grad for p in net.parameters())]


def asked(net: Features, loss: Tensor, features: Tensor) -> Any:
    return torch.autograd.grad(loss, (x for x in (features, *net.parameters())))


WAYS = {each.__name__: each for each in (retained, hooked, retained_behind_a_hook, asked)}


def found(way: str, result_only: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = Features().double()
    y, features = net(random(2, 3, 8, 6))
    loss = y.square().sum() + (0.0 if result_only else features.pow(3).sum())
    return [distconv.gather(x).detach() for x in torch.utils._pytree.tree_leaves(WAYS[way](net, loss, features))]


def differing(partition: str, largest_plain: int) -> list[Any]:
    """What differs from one process, in which results that are given as plain tensors have up to so many bytes."""
    mesh, wrong = distconv.init(partition, device_type="cpu"), []
    before, running.LARGEST_PLAIN = running.LARGEST_PLAIN, largest_plain
    try:
        for way in WAYS:
            for result_only in (False, True):
                expected = found(way, result_only)
                with distconv.distributed_script(mesh):
                    given = found(way, result_only)
                assert len(given) == len(expected)
                same = [torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(given, expected, strict=True)]
                wrong += [] if all(same) else [(way, result_only, same)]
    finally:
        running.LARGEST_PLAIN = before
    return wrong


@pytest.mark.parametrize("largest_plain", [0, 1 << 20])
@pytest.mark.parametrize("partition", ["sample=2,height=2", "channel=2"])
def test_hooks_and_gradients_of_features(ranks: Callable[[int], Ranks], partition: str, largest_plain: int) -> None:
    for wrong in ranks(4 if "," in partition else 2).run(differing, partition, largest_plain):
        assert not wrong


class Adaptive(nn.Module):
    """A loss that takes gradients by a parameter that it is given, and falls back if there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Conv2d(2, 1, 4, 2, 1)

    def forward(self, y: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        first, second = y.abs().mean(), self.discriminator(y).mean()
        try:
            grads = [torch.autograd.grad(each, last, retain_graph=True)[0] for each in (first, second)]
            weight = (grads[0].norm() / (grads[1].norm() + 1e-4)).detach()
        except RuntimeError:
            weight = torch.zeros(())
        return first + weight * second, weight


def adaptive(given: Callable[[nn.Module], nn.Module] = lambda model: model) -> list[Tensor]:
    torch.manual_seed(0)
    net, loss = (
        given(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).double()),
        given(Adaptive().double()),
    )
    value, weight = loss(net(random(2, 3, 8, 6)), last=net[2].weight)  # type: ignore[index]
    value.backward()
    return [distconv.gather(x).detach() for x in (value, weight, *(p.grad for p in net.parameters()))]


def adaptive_on_ranks(partition: str) -> bool:
    mesh, expected = distconv.init(partition, device_type="cpu"), adaptive()
    with distconv.distributed_script(mesh):
        given = adaptive()
    return all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(given, expected, strict=True))


@pytest.mark.parametrize("partition", ["height=2", "sample=2", "channel=2"])
def test_a_loss_takes_gradients_by_a_parameter_that_it_is_given(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert all(ranks(2).run(adaptive_on_ranks, partition))


def test_a_loss_that_is_given_a_parameter_runs_whole_beside_parts() -> None:
    for given, expected in zip(adaptive(lambda model: distconv.in_turn(model, "height=4")), adaptive(), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def of_outputs() -> list[Tensor]:
    """What hooks of the old kind are given of the outputs' gradients, as optimizers by Kronecker factors have them."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3, padding=1)
    net, seen = nn.Sequential(*layers).double(), dict[nn.Module, Tensor]()
    for layer in (layers[0], layers[2]):
        layer.register_backward_hook(lambda layer, _, outputs: seen.update({layer: outputs[0]}))
    x = random(2, 3, 8, 6).requires_grad_()
    (given,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    given.square().sum().backward()
    return [distconv.gather(seen[layer]) for layer in (layers[0], layers[2])]


def of_outputs_on_ranks(partition: str) -> bool:
    mesh, expected = distconv.init(partition, device_type="cpu"), of_outputs()
    with distconv.distributed_script(mesh):
        given = of_outputs()
    return all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(given, expected, strict=True))


def asks_for_inputs(partition: str) -> str:
    mesh = distconv.init(partition, device_type="cpu")
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    layer.register_backward_hook(lambda _, inputs, __: print(inputs[0]))
    with distconv.distributed_script(mesh), pytest.raises(distconv.UnsupportedOperation) as refused:
        layer(random(2, 3, 8, 6)).square().sum().backward()
    return str(refused.value)


@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_backward_hooks_are_given_gradients_of_results(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert all(ranks(2).run(of_outputs_on_ranks, partition))
    assert all("register_full_backward_hook" in said for said in ranks(2).run(asks_for_inputs, partition))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_backward_hooks_are_called_in_parts() -> None:
    def seen(net: nn.Module, layer: nn.Module) -> list[Tensor]:
        kept: list[Tensor] = []
        layer.register_backward_hook(lambda _, __, outputs: kept.append(outputs[0]))
        net(torch.linspace(-1, 1, 96).double().view(1, 3, 8, 4)).square().sum().backward()
        return kept

    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1).double()
    net = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1).double())
    own = copy.deepcopy(net)
    (expected,) = seen(net, first)
    (given,) = seen(distconv.in_turn(own, "height=2"), own[0])
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
