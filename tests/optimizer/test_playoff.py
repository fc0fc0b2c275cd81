"""How many rounds a playoff takes, and who wins it, on made-up times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mucudnn.optimizer.playoff import BASELINE, ROUNDS, Playoff

MARGIN = 0.05


def played(*contenders: Callable[[int], float], baseline: Callable[[int], float] = lambda call: 1.0) -> tuple[int, int]:
    """The winner, and the calls that it took.

    Args:
        contenders: the seconds of each contender's calls, by their number.
    """
    playoff = Playoff([MARGIN] * len(contenders), 1.0, [0.9] * len(contenders))
    calls = dict.fromkeys(range(-1, len(contenders)), 0)
    while playoff.winner is None:
        place = playoff.next()
        seconds = baseline if place == BASELINE else contenders[place]
        playoff.learn(place, seconds(calls[place]))
        calls[place] += 1
    return playoff.winner, sum(calls.values())


@pytest.mark.parametrize("seconds", [2.0, 1.1, 1.0, 0.96])
def test_what_takes_longer_than_it_may_loses(seconds: float) -> None:
    assert played(lambda call: seconds) == (BASELINE, 2 * ROUNDS)


@pytest.mark.parametrize("seconds", [0.8, 0.94])
def test_what_is_faster_every_time_wins(seconds: float) -> None:
    assert played(lambda call: seconds) == (0, 2 * ROUNDS)


def test_the_faster_of_two_wins_and_the_first_where_they_are_equal() -> None:
    assert played(lambda call: 0.8, lambda call: 0.8) == (0, 3 * ROUNDS)
    assert played(lambda call: 0.8, lambda call: (0.9, 0.7, 0.7)[call]) == (1, 3 * ROUNDS)


def test_a_round_goes_on_without_what_fails_in_it() -> None:
    playoff = Playoff([MARGIN] * 2, 1.0, [0.9] * 2)
    for place, seconds in ((BASELINE, 1.0), (0, 0.8)):
        assert playoff.next() == place
        playoff.learn(place, seconds)
    assert playoff.next() == 1
    playoff.drop(1)
    assert playoff.ratios[0] == [0.8] and playoff.next() == BASELINE
    playoff.drop(0)
    assert playoff.winner == BASELINE


def test_a_slow_baseline_is_not_called_again() -> None:
    playoff = Playoff([MARGIN], 20.0, [0.1])
    while playoff.winner is None:
        assert playoff.next() == 0
        playoff.learn(0, 0.1)
    assert playoff.winner == 0 and playoff.ratio(0) == pytest.approx(0.005)


def test_a_lucky_half_is_not_trusted() -> None:
    assert played(lambda call: (0.5, 1.5)[call % 2])[0] == BASELINE


def test_a_drift_of_the_machine_cancels() -> None:
    assert played(lambda call: 0.8 * 1.5**call, baseline=lambda call: 1.5**call)[0] == 0


def test_what_is_far_behind_is_not_called_and_what_disappoints_gives_way() -> None:
    playoff = Playoff([MARGIN] * 3, 1.0, [0.1, 0.15, 0.4])
    for place, seconds in ((0, 0.1), (1, 0.15)) * ROUNDS:
        assert playoff.next() == place
        playoff.learn(place, seconds)
    assert playoff.winner == 0
    playoff = Playoff([MARGIN] * 2, 1.0, [0.1, 0.4])
    playoff.learn(0, 2.0)
    assert playoff.next() == 1
