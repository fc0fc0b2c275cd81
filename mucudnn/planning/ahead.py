"""Planning ahead: the search's trials, made for nothing else, each of a launch computing its part alone."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mucudnn.convolution.problem import Dim
from mucudnn.optimizer import Exploration, Key, OverheadBudget, Trial
from mucudnn.planning.plan import Plan
from mucudnn.planning.search import Search
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.timing.schedule import LaunchError

PATIENCE = 20.0
"""Timing launches beyond the first of each algorithm may take so many times the time of torch's own kernel on the
whole."""


def plan_ahead(search: Search) -> Plan:
    """The plan of a problem within a limit, from the database or measured now."""
    kept = search.kept()
    if kept is not None:
        return kept
    stock_seconds = search.measurement.stock_seconds()
    if search.settings.workspace_limit == 0 or search.is_too_short(stock_seconds):
        plan = search.stock(stock_seconds)
        search.settle(plan)
        return plan
    exploration = search.exploration([stock_seconds], OverheadBudget(rate=math.inf), is_live=False)
    _Trials(search, exploration).make()
    assert exploration.settled is not None, "everything is granted"
    if exploration.settled.division is None and (wider := search.with_compiled()) is not None:
        return plan_ahead(wider)
    plan = replace(search.found(exploration, exploration.settled), trials=0, cost=0.0, tries=())  # none in its calls
    search.keep(plan, exploration)
    return plan


class _Trials:
    """The trials of one exploration, until it is settled."""

    def __init__(self, search: Search, exploration: Exploration) -> None:
        self._search, self._exploration = search, exploration
        self._runner = TrialRunner(search, search.measurement.strides)
        self._spent = 0.0

    def make(self) -> None:
        """Makes them, those of launches on several devices at once where these share the measuring."""
        exploration, peers = self._exploration, self._search.peers
        with ThreadPoolExecutor(max(1, len(peers))) as pool:
            while (trial := exploration.trial()) is not None:
                if trial.by_launch:
                    trials = self._at_once(trial, 1 + len(peers))
                    works = [pool.submit(self._timed, *one) for one in zip(trials[1:], peers, strict=False)]
                    found = [self._timed(trial, self._search), *(work.result() for work in works)]
                    for one, seconds in zip(trials, found, strict=True):
                        self._learn(one, seconds)
                    continue
                try:
                    exploration.learn(trial, sum(self._runner.laps(trial, self._search.measurement.turn())))
                except LaunchError as error:
                    exploration.fail(trial, error.algorithm, error.extent)

    def _at_once(self, first: Trial, count: int) -> list[Trial]:
        """A trial of a launch, and the next ones of other launches, at most so many."""
        trials, keys = [first], {_key(first)}
        while len(trials) < count:
            trial = self._exploration.trial(lambda fresh: not keys.isdisjoint(fresh))
            if trial is None or not trial.by_launch or _key(trial) not in self._exploration.fresh(trial):
                break
            trials.append(trial)
            keys.add(_key(trial))
        return trials

    def _timed(self, trial: Trial, search: Search) -> float | LaunchError:
        """Seconds of the first launch of a trial: the others would only compute the rest of a call."""
        assert trial.division is not None, "torch's own kernel has no launches"
        dim, algorithm, size = _key(trial)
        most = self._exploration.bar(algorithm) * size / trial.division.extent
        try:
            return search.measurement.seconds((search.providers[algorithm], algorithm), Dim(dim), size, most)
        except LaunchError as error:
            return error

    def _learn(self, trial: Trial, seconds: float | LaunchError) -> None:
        exploration, key = self._exploration, _key(trial)
        if isinstance(seconds, LaunchError):
            exploration.fail(trial, seconds.algorithm, seconds.extent)
            return
        self._spent += seconds if exploration.launches.is_met(*key[:2]) else 0.0
        exploration.adopt({key: seconds / exploration.baseline_seconds})
        self._search.note(key, seconds)
        if self._spent > PATIENCE * exploration.baseline_seconds:
            exploration.end_survey()


def _key(trial: Trial) -> Key:
    """The launch that a trial is made for."""
    assert trial.division is not None, "torch's own kernel has no launches"
    tried = trial.division.options[0]
    return trial.dim, tried.algorithm, tried.extent
