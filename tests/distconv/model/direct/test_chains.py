"""Models that compute in chains give what one process gives, forward and backward, with fewer exchanges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv import settings
from distconv.transfer.exchange import Exchange

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def chains() -> Iterator[None]:
    with settings.options({"halo": "chain"}):
        yield


class Layers(nn.Module):
    """Convolutions with functions of each position between them.

    ``kinds``: by layer, kernel size, stride, padding, dilation, and what follows it.
    """

    def __init__(self, *kinds: tuple[int, int, int, int, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.layers = nn.ModuleList(
            nn.Conv2d(3, 3, kernel, stride, padding, dilation) for kernel, stride, padding, dilation, _ in kinds
        )
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, (*_, behind) in zip(self.layers, self.kinds, strict=True):
            y = layer(x)
            if behind == "relu":
                y = y.relu_()
            elif behind == "norm":
                y = self.norm(y).sigmoid()
            elif behind == "add" and y.shape == x.shape:
                y = y + x
            elif behind == "changed" and y.shape == x.shape:
                y *= x
            elif behind == "cat":
                y = torch.cat([y.tanh(), 2 * y], 1)[:, ::2]
            x = y
        return x


def results(model: nn.Module, x: Tensor, train: bool = False) -> list[Tensor]:
    model.train(train).zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [distconv.whole_state(p.grad).clone() for p in model.parameters() if p.grad is not None]
    return [distconv.gather(y.detach()), x.grad, *grads]


def worst(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float(((a - b).abs().max() if a.numel() else 0) / (1 + b.abs().max())) for a, b in pairs)


def stack(layers: int = 6) -> nn.Module:
    kinds = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(layers)]
    torch.manual_seed(0)
    return nn.Sequential(*kinds).double().eval()


class Fetches:
    """Counts the exchanges of a process from now on."""

    def __init__(self, patch: Callable[[Any, str, Any], None]) -> None:
        self.count = 0
        fetch = Exchange.fetch

        def counted(exchange: Exchange, local: Tensor, fill: float = 0.0) -> Tensor:
            self.count += not exchange.plan.silent
            return fetch(exchange, local, fill)

        patch(Exchange, "fetch", counted)


layer = st.tuples(
    st.integers(1, 4),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(0, 3),
    st.integers(1, 2),
    st.sampled_from(["", "relu", "norm", "add", "changed", "cat"]),
)


@examples(deadline=None, max_examples=40)
@given(
    st.lists(layer, min_size=1, max_size=6),
    st.integers(7, 40),
    st.sampled_from(["height=2", "height=3", "height=2,width=2", "sample=2,height=2", "width=4"]),
)
@example([(1, 2, 1, 1, ""), (3, 3, 0, 2, "norm"), (2, 1, 0, 1, "")], 19, "height=2")  # one part has a single row
def test_random_layers_in_turn(kinds: list[Any], rows: int, parts: str) -> None:
    x = torch.randn(2, 3, rows, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Layers(*kinds).double()
    try:
        expected = results(copy.deepcopy(model), x)
    except RuntimeError:  # a kernel that is larger than its input
        return
    distconv.in_turn(model, parts)
    for _ in range(3):
        assert worst(results(model, x), expected) < TOLERANCE


def test_six_layers_exchange_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4, 64, 10, dtype=torch.float64)
    model = stack()
    expected = results(copy.deepcopy(model), x)
    distconv.in_turn(model, "height=4")
    fetches = Fetches(monkeypatch.setattr)
    for count in (4 * 6 + 4, 4, 4):  # before the first call it is followed, and every layer fetches its own halo there
        fetches.count = 0
        with torch.no_grad():
            model(x)
        assert fetches.count == count
        assert worst(results(model, x), expected) < TOLERANCE


def test_a_call_with_other_links_is_right() -> None:
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = stack(), 0

        def forward(self, x: Tensor, last: int) -> Tensor:
            for each in [*self.layers][:last]:
                x = each(x)
            return x * 2 if last % 2 else x

    model = Depends()
    alone = copy.deepcopy(model)
    distconv.in_turn(model, "height=3")
    x = torch.randn(1, 4, 33, 8, dtype=torch.float64)
    for last in (3, 3, 5, 5, 2, 6, 3, 4, 1, 6):
        assert (model(x, last) - alone(x, last)).abs().max() < TOLERANCE


def test_without_versions() -> None:
    """Tensors of inference mode do not tell that they have been changed."""

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            z = self.layers[1](y)
            y[..., :2] = 0
            return self.layers[2](y) + self.layers[3](z)

    model = Changes()
    alone = copy.deepcopy(model)
    distconv.in_turn(model, "height=3")
    x = torch.randn(1, 4, 33, 8, dtype=torch.float64)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            for _ in range(3):
                assert (model(x.clone()) - alone(x.clone())).abs().max() < TOLERANCE


def exchanged(halo: str, partition: str) -> list[tuple[int, float]]:
    """By call: the exchanges of a forward, and the difference from one process of a training step."""
    x = torch.randn(2, 4, 64, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = stack()
    expected = results(copy.deepcopy(alone), x)
    fetch, found = Exchange.fetch, []
    fetches = Fetches(setattr)
    with settings.options({"halo": halo}):
        model = distconv.parallelize(stack(), distconv.init(partition, device_type="cpu"))
        for _ in range(3):
            fetches.count = 0
            with torch.no_grad():
                model(x)
            found.append((fetches.count, worst(results(model, x), expected)))
    Exchange.fetch = fetch  # type: ignore[method-assign]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("size", "partition", "dims"), [(2, "height=2", 1), (4, "height=2,width=2", 2)])
def test_ranks_exchange_once(ranks: Callable[[int], Ranks], size: int, partition: str, dims: int) -> None:
    for halo, counts in (("layer", [6, 6, 6]), ("chain=8", [6, 1, 1])):
        for found in ranks(size).run(exchanged, halo, partition):
            assert [count for count, _ in found] == [count * dims for count in counts]
            assert all(error < TOLERANCE for _, error in found)
