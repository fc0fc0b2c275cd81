"""Forecasts of launches' times, on made-up machines whose times are powers of sizes with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mucudnn.optimizer import Costs

SIZES = 5


@dataclass
class Machine:
    """Times of launches by the powers of their sizes, what a group has in common, and noise."""

    seed: int
    between: float = 0.3
    noise: float = 0.05

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.powers = [1.0 + self._random.gauss(0, 0.2), *(self._random.gauss(0, 0.2) for _ in range(SIZES - 1))]

    def sizes(self) -> list[float]:
        return [math.exp(self._random.uniform(0, 4)) for _ in range(SIZES)]

    def groups(self, number: int, members: int) -> Iterator[tuple[int, list[float], float]]:
        """(group, sizes, seconds) of launches; those of a group differ in their first two sizes."""
        for group in range(number):
            sizes, shared = self.sizes(), self._random.gauss(0, self.between)
            for _ in range(members):
                sizes = [*self.sizes()[:2], *sizes[2:]]
                logs = sum(power * math.log(size) for power, size in zip(self.powers, sizes, strict=True))
                yield group, sizes, 1e-9 * math.exp(logs + shared + self._random.gauss(0, self.noise))


def test_nothing_is_forecast_of_an_unknown_kind() -> None:
    costs = Costs()
    costs.add("fft", 0, [1.0, 2.0], 1.0)
    assert costs.forecast("gemm", 0, [1.0, 2.0]) is None


def test_one_launch_shows_vaguely_what_others_take() -> None:
    costs = Costs()
    costs.add("fft", 0, [1e6, 8.0], 0.01)
    same, larger, other = (costs.forecast("fft", 0, sizes) for sizes in ([1e6, 8.0], [2e6, 8.0], [2e6, 800.0]))
    assert same is not None and larger is not None and other is not None
    assert same.seconds == pytest.approx(0.01, rel=1e-3)
    assert larger.seconds == pytest.approx(0.02, rel=1e-2), "time grows with the first size"
    assert 1 < same.uncertainty < larger.uncertainty < other.uncertainty
    assert other.uncertainty > 3, "what a hundredfold size does is unknown"


@pytest.mark.parametrize(("known", "members"), [(3, 3), (12, 3), (30, 1)])
def test_launches_hardly_take_less_than_is_forecast(known: int, members: int) -> None:
    less, widths = 0, []
    for seed in range(100):
        machine, costs = Machine(seed), Costs()
        *launches, (_, sizes, seconds) = machine.groups(known + 1, members)
        for group, *launch in launches:
            if group < known:
                costs.add("fft", group, *launch)
        forecast = costs.forecast("fft", known, sizes)
        assert forecast is not None
        less += seconds < forecast.seconds / forecast.uncertainty
        widths.append(forecast.uncertainty)
    assert less <= 22, "84 of 100 are promised"
    if known > 3:
        assert sorted(widths)[50] < 1.9, "a forecast that says nothing is never wrong either"


def test_launches_of_the_same_group_tell_most() -> None:
    machine, costs = Machine(1), Costs()
    launches = list(machine.groups(12, 4))
    for group, sizes, seconds in launches[:-1]:
        costs.add("fft", group, sizes, seconds)
    _, sizes, seconds = launches[-1]
    own, stranger = costs.forecast("fft", 11, sizes), costs.forecast("fft", 99, sizes)
    assert own is not None and stranger is not None
    assert own.uncertainty < 1.5 < stranger.uncertainty
    assert own.uncertainty**-2 < own.seconds / seconds < own.uncertainty**2


def test_a_launch_that_was_disturbed_does_not_spoil_the_others() -> None:
    machine, clean, spoilt = Machine(2, between=0.05), Costs(), Costs()
    launches = list(machine.groups(30, 1))
    for number, (group, sizes, seconds) in enumerate(launches):
        clean.add("fft", group, sizes, seconds)
        spoilt.add("fft", group, sizes, seconds * (50 if number == 7 else 1))
    sizes = machine.sizes()
    one, other = clean.forecast("fft", 99, sizes), spoilt.forecast("fft", 99, sizes)
    assert one is not None and other is not None
    assert abs(math.log(other.seconds / one.seconds)) < 0.3


def test_groups_are_counted_by_their_launches() -> None:
    costs = Costs()
    assert costs.groups("fft", 1) == 0
    for group in (0, 0, 1):
        costs.add("fft", group, [1e6], 0.01)
    assert (costs.groups("fft", 1), costs.groups("fft", 2), costs.groups("gemm", 1)) == (2, 1, 0)
