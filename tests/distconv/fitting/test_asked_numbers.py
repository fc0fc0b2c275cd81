"""Models that ask for numbers of their tensors, within a limit of memory: they are followed with guesses at first."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.fitting.following import followed
from distconv.model.direct.chains.call import PRICES
from distconv.turns.asked_numbers import MOST, AskedNumbers, asked_here
from distconv.turns.data_dependent import NumbersOfCall
from distconv.turns.shapes_only import ShapesOnly

STEPS = 3


def checked(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), "infinite"
    return x


def clamped(x: Tensor) -> Tensor:
    return x.clamp(-1, 1) if x.abs().max() > 1 else x


def divided(x: Tensor) -> Tensor:
    return x / x.detach().abs().max().item()


def repeated(x: Tensor) -> Tensor:
    while x.abs().mean() > 0.05:
        x = x * 0.5
    return x


def of_channels(x: Tensor) -> Tensor:
    kept = x[:, x.detach().mean((0, 2, 3)) > 0]
    return torch.cat([kept, x.new_zeros(x.shape[0], x.shape[1] - kept.shape[1], *x.shape[2:])], 1)


def in_halves(x: Tensor) -> Tensor:
    """Cannot be followed before the numbers are known: together the guesses are twice as many."""
    kept = x.detach().mean((0, 2, 3)) > 0
    return torch.cat([x[:, kept], x[:, ~kept]], 1) + x


def by_lists(x: Tensor) -> Tensor:
    means = x.detach().mean((0, 2, 3)).tolist()
    return x - sum(means) / len(means)


def by_arrays(x: Tensor) -> Tensor:
    return x - float(x.detach().mean((0, 2, 3)).numpy().max())


ASKING = checked, clamped, divided, repeated, of_channels, in_halves, by_lists, by_arrays


class Net(nn.Module):
    def __init__(self, asks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layers = [nn.Conv2d(2, 8, 3, padding=1), *(nn.Conv2d(8, 8, 1) for _ in range(4)), nn.Conv2d(8, 2, 1)]
        self.layers, self.asks = nn.ModuleList(layers), asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.asks(torch.tanh(layer(x)))
        return x


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        return [*losses, model(x), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("asks", ASKING)
def test_a_model_that_asks_for_numbers_keeps_within_a_limit(
    asks: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model, x = Net(asks).double(), torch.randn(2, 2, 64, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain.asks = lambda x: x
    limit = max(followed(plain, (x,), {}, True, PRICES["cpu"]).alive()) // 3
    expected = train(copy.deepcopy(model), x)
    found = train(distconv.fit(model, limit), x)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-12)
    lines = [line for line in capsys.readouterr().err.splitlines() if "--memory" in line]
    guessed = [bool(re.search(r"guessed.*test_asked_numbers\.py:\d+", line)) for line in lines]
    assert "in parts" in lines[-1], lines
    assert "no way fits" not in lines[-1], lines
    if asks is in_halves:
        assert "runs whole, as it cannot be followed" in lines[0]
    else:
        assert guessed[0], lines
    if asks not in (by_lists, by_arrays):  # which read memory, where no operator of torch shows the numbers
        assert not guessed[-1], lines


@pytest.mark.parametrize("read", [lambda x: x.max() > 0.1, lambda x: x.detach().mean((0, 2, 3)).numpy().max() > -1])
def test_state_that_depends_on_a_number_does_not_end_a_call(read: Callable[[Tensor], Any]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(6)))
            self.large = 0

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers(x))
            if read(x):
                self.large += 1
            return x

    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(4))).double()
    x = torch.randn(1, 4, 64, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    expected = train(plain, x)
    found = train(distconv.fit(model, 9 * x.nbytes), x)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-12)
    assert [each.large for each in model] == [each.large for each in plain]  # type: ignore[union-attr]


def test_guesses_that_lead_to_an_error_are_replaced() -> None:
    asked = AskedNumbers({})
    tried: list[list[bool]] = []

    def follow() -> list[bool]:
        here = asked_here()
        assert here is not None
        tried.append([bool(here.element(torch.bool)) for _ in range(3)])
        if tried[-1] != [False, True, True]:
            raise RuntimeError("not as in the call")
        return tried[-1]

    assert asked.followed(follow) == [False, True, True]
    assert tried == [[False] * 3, [False, False, True], [False, True, False], [False, True, True]]


def test_a_loop_that_no_guess_ends_is_an_error() -> None:
    asked, number = AskedNumbers({}), 0
    expected = r"test_asked_numbers.py:\d+ asks for a number more than 1000 times"
    with asked.answering(), pytest.raises(RuntimeError, match=expected):
        while asked.element(torch.int64) == 1:
            number += 1
    assert number == MOST


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nonzero(x),
        lambda x: torch.unique(x),
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda x: torch.unique(x, dim=1, return_inverse=True, return_counts=True),
        lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x[x > 0],
        lambda x: x[:, x[0] > 0],
        lambda x: x[torch.arange(5) > 1],
        lambda x: torch.equal(x, x + 1),
        lambda x: x.argmax().item(),
    ],
)
def test_results_have_the_shapes_of_torchs_where_answers_are_known(function: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7).round()
    with NumbersOfCall() as numbers:
        expected = function(x)
    asked = AskedNumbers(numbers.answers)
    with asked.answering(), ShapesOnly() as shapes:
        found = function(shapes.from_tensor(x))
    assert not asked.guessed
    if not isinstance(expected, Tensor | tuple):
        assert found == expected
        return
    both = [(each,) if isinstance(each, Tensor) else each for each in (found, expected)]
    for each, other in zip(*both, strict=True):
        assert (each.shape, each.dtype) == (other.shape, other.dtype)


def test_small_integers_keep_their_numbers() -> None:
    lengths = torch.tensor([3, 5, 2])
    shapes = ShapesOnly()
    kept = shapes.fake_tensor_converter.from_real_tensor(shapes, lengths.clone(), make_constant=True)
    asked = AskedNumbers({})
    with asked.answering(), shapes:
        assert int((kept + 1).max()) == 6
        assert torch.tensor([[4, 5], [6, 7]]).tolist() == [[4, 5], [6, 7]]
        assert (kept > 2).nonzero().shape == (2, 1)
    assert not asked.guessed
