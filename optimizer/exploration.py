"""Exploration: which division the next call tries, from the times of earlier calls, until the best one is found.

Every division is exact, so any of them may compute a call. A trial is a bet: if a launch turns out slow, its call is
slower than the baseline, the undivided call of one algorithm. `OverheadBudget` limits the time that trials may lose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.optimizer.launches import Launches, Variant
from mucudnn.optimizer.option import Division, Key
from mucudnn.optimizer.overhead_budget import OverheadBudget
from mucudnn.optimizer.playoff import BASELINE, DECISIVE, Playoff

MOST_CONTENDERS = 3

MOST_CALLS = 3.0  # Calls of the baseline that a trial of launches of which nothing was timed may be expected to take.


@dataclass(frozen=True)
class Trial:
    """A computation of a call.

    Attributes:
        division: `None` for the baseline; the seconds of its options are the expected ones.
        by_launch: whether every launch is timed, rather than the whole.
        place: in the playoff.
    """

    division: Division | None = None
    by_launch: bool = False
    place: int = BASELINE

    @property
    def keys(self) -> tuple[Key, ...]:
        """The launches, the one that is tried first of all; none of the baseline."""
        return () if self.division is None else self.division.keys


@dataclass(frozen=True)
class Settled:
    """The result of an exploration.

    Attributes:
        division: `None` for the baseline.
        seconds: of the division: the baseline's, times the upper quartile of the ratios to it.
        undivided_seconds: of the best algorithm that computes the whole at once, the baseline included.
        spread: the factor within which the ratio of the division's time to the baseline's was seen.
    """

    division: Division | None
    seconds: float
    undivided_seconds: float
    spread: float = math.inf


class Exploration:
    """The candidates of one convolution, and what is known of their times.

    First every variant that may win is tried on a part of a call, the most promising first; the baseline computes the
    rest of that call. Then its other sizes are tried, one in each call. Then the best whole divisions play off against
    the baseline and each other.

    Attributes:
        settled: the result; `None` until it is found.
        tried: the number of trials.
        tries: {algorithm: calls that tried it}; for the baseline's algorithm, calls that tried nothing but its parts.
        lost: seconds of the trials beyond the baseline.
        launches: the measured times.
        calls: so far; those before the exploration are set from outside.
    """

    def __init__(
        self,
        baseline: str,
        seconds: Sequence[float],
        variants: Sequence[Variant],
        overhead: OverheadBudget,
        margins: tuple[float, float],
        warm_ups: int = 0,
        launches: dict[Key, list[float]] | None = None,
        smallest_first: bool = False,
        any_gain: bool = False,
        plays_baseline: bool = True,
    ) -> None:
        """
        Args:
            baseline: the algorithm whose undivided call only a faster division replaces.
            seconds: measured times of such calls, at least one.
            variants: what may be tried; the baseline's algorithm only on parts.
            overhead: shared by all convolutions of a program.
            margins: shares of the baseline's time by which a division must be faster: in general, and if all its parts
                use the baseline's algorithm.
            warm_ups: the number of first times of a launch that do not count, because they include loading kernels.
            launches: {launch: times}, shared with explorations of the same convolution within other limits.
            smallest_first: as `Launches` has it.
            any_gain: whether launches are tried that may beat the baseline though not the best division so far: where
                the limit may become smaller later, those with less workspace are of interest.
            plays_baseline: whether the baseline may be called; otherwise its seconds are assumed.
        """
        self._any_gain, self._plays_baseline = any_gain, plays_baseline
        self._name, self._overhead, self._margins, self._warm_ups = baseline, overhead, margins, warm_ups
        self.launches = Launches(variants, baseline, launches, smallest_first)
        self.settled: Settled | None = None
        self.tried, self.lost = 0, 0.0
        self.tries: dict[str, int] = {}
        self._baseline = list(seconds)
        self._seen: dict[Key, int] = {}
        self._contenders: list[Division] = []
        self._playoff: Playoff | None = None
        self._surveyed = False
        # Trials of launches, and the fastest division beside the baseline, kept until more is known.
        self._wanted: list[Division] | None = None
        self._fastest: Division | None = None
        self.calls = 0

    @property
    def baseline_seconds(self) -> float:
        """Median of the baseline's calls, without the first where there are others: the first one warms up."""
        return statistics.median(self._baseline[1:] or self._baseline)

    @property
    def spread(self) -> float:
        """The factor within which the baseline's calls took equally long; infinite where there was only one."""
        return _spread(self._baseline)

    def leader(self) -> tuple[str, float]:
        """The algorithms of the fastest division by the times so far, and its seconds; "" for the baseline."""
        best = min(self.launches.wholes(), key=lambda division: division.seconds, default=None)
        if best is None or best.seconds >= self.baseline_seconds:
            return "", self.baseline_seconds
        return " + ".join(dict.fromkeys(option.algorithm for option in best.options)), best.seconds

    def trial(self) -> Trial | None:
        """The trial of the next call; `None` if the baseline computes it and its time is not needed."""
        while self.settled is None:
            if not self._surveyed:
                trial = self._survey()
                if trial is not None or not self._surveyed:
                    return trial
            elif self._playoff is None:
                self._begin()
            elif self._playoff.winner is not None:
                self._end(self._playoff)
            else:
                place = self._playoff.next()
                if place == BASELINE:
                    return Trial()
                excess = (self._playoff.expected(place) - 1) * self.baseline_seconds
                # Its launches may be slower together than alone, but not twice as slow.
                is_known = bool(self._playoff.ratios[place]) or self._playoff.expected(place) < DECISIVE
                is_granted = self._overhead.grants(excess, is_known=is_known)
                return Trial(self._contenders[place], place=place) if is_granted else None
        return None

    def learn(self, trial: Trial, total: float, launches: Sequence[float] = ()) -> None:
        """Notes the time of a call.

        Args:
            total: seconds of the whole call.
            launches: seconds of each option of the division, where every launch was timed.
        """
        self._wanted = None
        baseline = self.baseline_seconds
        self.passed()
        if trial.division is None:
            self._baseline.append(total)  # however slow it was: the program would have had to wait for it, too
        else:
            self._overhead.count(baseline, total, rate=0.0)
            self.tried += 1
            algorithms = {option.algorithm for option in trial.division.options}
            for name in algorithms - {self._name} or algorithms:
                self.tries[name] = self.tries.get(name, 0) + 1
            self.lost += total - baseline
        if trial.by_launch:
            for key, seconds in zip(trial.keys, launches, strict=True):
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] > self._warm_ups:
                    self.launches.seconds.setdefault(key, []).append(seconds)
        elif self._playoff is not None:
            self._playoff.learn(trial.place, total)

    def passed(self, calls: int = 1) -> None:
        """Notes calls by the baseline that nobody has timed."""
        self._overhead.earn(self.baseline_seconds, calls, self.calls)
        self.calls += calls

    def bar(self, algorithm: str, best: float | None = None) -> float:
        """Seconds of the whole below which an algorithm's launches may be part of the best division.

        ``best``: `_best()`, if that is at hand.
        """
        margin = self._margins[algorithm == self._name]
        return min(self._best() if best is None else best, (1 - margin) * self.baseline_seconds)

    def _best(self) -> float:
        """Expected seconds of the fastest division so far, which others must beat; if any gain will do, infinite."""
        if self._any_gain:
            return math.inf
        return min((division.seconds for division in self.launches.wholes()), default=math.inf)

    def end_survey(self) -> None:
        """Tries no further launches: the best divisions of those that are known play off."""
        self._surveyed = True

    def fresh(self, trial: Trial) -> list[Key]:
        """The launches of a trial that were never timed, each once."""
        return sorted(set(trial.keys).difference(self.launches.seconds))

    def adopt(self, ratios: Mapping[Key, float]) -> None:
        """Notes times of launches that were measured elsewhere, in units of the baseline there."""
        self._wanted = None
        for key, ratio in ratios.items():
            self.launches.seconds.setdefault(key, []).append(ratio * self.baseline_seconds)

    def fail(self, trial: Trial, algorithm: str, extent: int) -> None:
        """Excludes an algorithm from the extent at which it failed upwards; with extent 0, along all dims."""
        self._wanted = None
        dims = {variant.dim for variant in self.launches.variants}
        for dim in dims if extent == 0 or trial.division is None else (trial.division.dim,):
            self.launches.fail(dim, algorithm, extent)
        if self._playoff is not None:
            for place, division in enumerate(self._contenders):
                uses_it = any(option.algorithm == algorithm for option in division.options)
                if place == trial.place or (extent == 0 and uses_it):
                    self._playoff.drop(place)

    def _survey(self) -> Trial | None:
        """The next trial of launches; `None` if it costs too much now or, with `_surveyed` set, if none is left.

        If the budget grants no trial, the fastest measured division computes the call: it earns the next trial sooner
        than the baseline does.
        """
        stock = self.baseline_seconds
        if self._wanted is None:
            fastest = min(self.launches.wholes(), key=lambda whole: whole.seconds, default=None)
            self._fastest = None if fastest is None or fastest.seconds >= stock else fastest
            best = math.inf if self._any_gain or fastest is None else fastest.seconds
            found = self.launches.trials(lambda name: self.bar(name, best), stock, best)
            most = math.inf if self._overhead.balance == math.inf else MOST_CALLS * stock
            self._wanted = [whole for whole in found if whole.seconds <= most]
            self._surveyed = not self._wanted
        if self._surveyed:
            return None
        awaited: tuple[str, str] | None = None
        for whole in self._wanted:
            trial, variant = Trial(whole, by_launch=True), whole.keys[0][:2]
            if awaited not in (None, variant) and whole.seconds >= stock:
                continue  # what is more promising is to be paid for first
            if not self._overhead.grants(whole.seconds - stock):
                awaited = awaited or variant
            else:
                return trial
        return None if self._fastest is None else Trial(self._fastest, by_launch=True)

    def _begin(self) -> None:
        """Starts a playoff of the best divisions."""
        stock, wholes = self.baseline_seconds, dict.fromkeys(self.launches.wholes())
        fast = (whole for whole in wholes if whole.seconds < (1 - self._margin(whole)) * stock)
        self._contenders = sorted(fast, key=lambda whole: whole.seconds)[:MOST_CONTENDERS]
        margins, expected = (list(map(of, self._contenders)) for of in (self._margin, lambda whole: whole.seconds))
        self._playoff = Playoff(margins, stock, expected, self._plays_baseline)

    def _margin(self, division: Division) -> float:
        return self._margins[1 if {option.algorithm for option in division.options} == {self._name} else 0]

    def _end(self, playoff: Playoff) -> None:
        """Settles on the winner."""
        stock, winner = self.baseline_seconds, playoff.winner
        if winner is None or winner == BASELINE:
            self.settled = Settled(None, stock, stock, self.spread)
            return
        seconds = {place: playoff.ratio(place) * stock for place, ratios in enumerate(playoff.ratios) if ratios}
        played = {self._contenders[place].keys: found for place, found in seconds.items()}
        wholes = (whole for whole in self.launches.wholes() if len(whole.options) == 1)
        undivided = [played.get(whole.keys, whole.seconds) for whole in wholes]
        ratios = playoff.ratios[winner]
        # Where the baseline took no turn, the ratios are to what it took before.
        spread = _spread(ratios) * (self.spread if playoff.ratio(winner) < DECISIVE else 1.0)
        self.settled = Settled(self._contenders[winner], seconds[winner], min([stock, *undivided]), spread)


def _spread(values: Sequence[float]) -> float:
    """The factor within which the middle half of some values is; of few values, all of them."""
    if len(values) < 2:
        return math.inf
    first, _, last = statistics.quantiles(values, n=4, method="inclusive")
    least, most = (first, last) if len(values) > 3 else (min(values), max(values))
    return most / max(least, 1e-12)
