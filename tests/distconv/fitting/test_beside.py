"""Calls and models of one script keep within a limit together."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.fitting.beside import Beside, Chosen, Others
from distconv.fitting.choice import Fit
from distconv.fitting.models import Fitting
from distconv.turns.turning import turn
from mucudnn.devices import allocations


def chosen(kept: int, alone: int, limit: float) -> Chosen:
    return Chosen(Fit(alone + 500, 1.0, kept=kept, alone=alone), limit, own=10)


def called(beside: Beside, module: nn.Module, how: Chosen) -> Tensor:
    y: Tensor = module(torch.ones(2, 3)).tanh()
    beside.note(how, y)
    return y


def test_a_graph_counts_until_its_backward_begins_or_it_is_dropped() -> None:
    beside, first, second = Beside(), nn.Linear(3, 3), nn.Linear(3, 3)
    how, other = chosen(30, 50, 100.0), chosen(20, 60, 100.0)
    assert beside.others(first, how) == Others(0, 0, 0)
    y = called(beside, first, how)
    weights = 2 * 4 * 12  # with gradients, of the first model
    assert beside.others(second, other) == Others(30 + weights, 0, 0)
    z = called(beside, second, other)
    assert beside.others(first, how) == Others(20 + weights, 1, 60), "the second call's own memory counts"
    y.sum().backward()
    own = 4 * 12  # gradients that the next backward adds to
    assert beside.others(first, how) == Others(20 + weights + own, 0, 60)
    del z
    assert beside.others(first, how) == Others(weights + own, 0, 60)
    del second
    gc.collect()
    assert beside.others(first, how).kept == own
    first.zero_grad()
    assert beside.others(first, how).kept == 0


def test_what_is_beside_a_call_may_make_it_not_suit() -> None:
    how = chosen(30, 50, 100.0)
    assert how.suits(Others(50, 0, 0)) and not how.suits(Others(51, 0, 0))
    assert how.suits(Others(0, 1, 0)) and not how.suits(Others(0, 2, 0)), "others of its kind keep 30 each"
    assert how.suits(Others(0, 0, 60)) and not how.suits(Others(0, 0, 61)), "after forward, 40 are there"
    how.choose(Chosen(Fit(80, 1.0, fits=False, alone=80), 100.0, Others(90, 1, 0)))
    assert how.suits(Others(90, 1, 0)), "it is not chosen anew for the same"
    assert how.suits(Others(91, 1, 0)) and not how.suits(Others(91, 0, 0)), "nothing fits beside more, either"


def test_choices_for_other_memory_are_found_again() -> None:
    how, beside_much = chosen(30, 50, 100.0), Others(60, 0, 0)
    assert how.choose_again(Others(50, 0, 0)) and not how.choose_again(beside_much)
    how.add(Chosen(Fit(20, 3.0, alone=20), 100.0, how.least_others(beside_much)))
    assert how.choose_again(beside_much) and how.fit.slower == 3
    assert how.choose_again(Others(50, 0, 0)) and how.fit.slower == 1
    assert not how.choose_again(Others(90, 0, 0)) and not how.choose_again(Others(50, 0, 200))
    assert how.least_others(Others(50, 0, 200)) == Others(60, 0, 200), "the third choice is for all memory so far"
    how.guessed = how.past[0].guessed = {"": [(bool, True)]}  # type: ignore[dict-item]
    how.confirm()
    assert not how.guessed and not how.past[0].guessed and how.choose_again(beside_much)
    how.choose(Chosen(Fit(20, 3.0, alone=20), 100.0))
    assert how.choose_again(Others(50, 0, 0)) and how.fit.slower == 3, "earlier choices are gone"


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.SiLU())


class Step:
    """A generator and a discriminator: up to three graphs are alive."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(block(3, 16), *(block(16, 16) for _ in range(6)), nn.Conv2d(16, 3, 1)).double()
        self.discriminator = nn.Sequential(block(3, 16), *(block(16, 16) for _ in range(3)), nn.Conv2d(16, 1, 1))
        self.discriminator.double()
        self.known: list[Tensor] = []

    def __call__(self, seed: int) -> list[float]:
        torch.manual_seed(seed)
        x, y = (torch.randn(1, 3, 96, 96, dtype=torch.float64) for _ in range(2))
        fake = self.generator(x)
        real = self.discriminator(y).square().mean() + (1 - self.discriminator(fake.detach())).square().mean()
        real.backward()
        loss = self.discriminator(fake).square().mean() + (fake - y).abs().mean()
        loss.backward()
        return [real.item(), loss.item()]

    @property
    def models(self) -> list[nn.Module]:
        return [self.generator, self.discriminator]


def peak_of(step: Step, seed: int) -> int:
    """The most bytes that this thread has allocated at once in a step, and those of parameters."""
    gc.collect()
    taken = allocations.peak_bytes(lambda: step(seed), torch.device("cpu"))
    return taken + sum(p.nbytes for model in step.models for p in model.parameters())


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_a_step_of_two_models_keeps_within_the_limit(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    plain, fitted = Step(), Step()
    expected = [plain(seed) for seed in range(3)]
    limit = int(share * peak_of(copy.deepcopy(plain), 3))
    fitting = Fitting(limit)
    fitting._prices = lambda *_: distconv.model.direct.chains.call.PRICES["cpu"]  # type: ignore[method-assign]
    for model in fitted.models:
        turn(model, (fitting, None), None, "distconv.fit")
    found = [fitted(seed) for seed in range(3)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=1e-12)
    for model, other in zip(fitted.models, plain.models, strict=True):
        for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12, msg=name)
    capsys.readouterr()
    assert peak_of(fitted, 3) <= limit
    assert not capsys.readouterr().err, "what was chosen anew in the second step stays"
