"""The divisions of a convolution that a database offers; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.convolution.problem import ConvProblem
from mucudnn.optimizer import Division, Option, desirable_divisions, desirable_set, micro_batch_sizes
from mucudnn.planning.plan import MARGIN
from mucudnn.providers import STOCK
from mucudnn.timing.store import canonical

_PROBLEM = ("direction", "x", "w", "y", "stride", "padding", "dilation", "groups", "transposed", "dtype", "formats")
"""The fields of a database's key that come from `ConvProblem.launch_key()`."""


@dataclass(frozen=True)
class Choices:
    """How a convolution may be computed."""

    desirable: list[Division]
    """The choices that no other beats in time and workspace, ascending in workspace; the first is torch's own
    kernel, and the others are faster than it by the planner's margin."""
    undivided: list[Option]  # Every algorithm on the whole, torch's own kernel among them.

    @property
    def stock(self) -> Division:
        """Torch's own kernel."""
        return self.desirable[0]


@dataclass(frozen=True)
class RecordedTimes:
    """The times of one environment."""

    environment: dict[str, Any]  # The machine, libraries and switches under which they were measured.
    rows: dict[str, Sequence[Option]]

    @property
    def name(self) -> str:
        """The environment in words, the device first."""
        names = sorted(self.environment, key=lambda name: name != "device")
        return ", ".join(f"{name} {self.environment[name]}" for name in names)

    def knows(self, problem: ConvProblem) -> bool:
        """Whether torch's own kernel was timed on the whole of a problem; without that nothing can be said."""
        return self._stock(problem) is not None

    def batches(self, problem: ConvProblem) -> set[int]:
        """The numbers of samples on which torch's own kernel was timed as a whole, of a problem of any number."""
        return {row.extent for row in self._of(problem) if row.algorithm == STOCK and not row.workspace}

    def choices(self, problem: ConvProblem, policy: str) -> Choices:
        """The choices for a problem by these times; the parts of a mini-batch have the policy's sizes.

        A division that was timed as a whole counts for that time. Divisions along a spatial dim are known as wholes
        only.

        Raises:
            KeyError: for a problem that is not known.
        """
        stock = self._stock(problem)
        if stock is None:
            raise KeyError(str(problem))
        rows = self._of(problem)
        sizes = set(micro_batch_sizes(policy, problem.extent))
        launches = [row for row in rows if row.extent in sizes and not _is_whole(row) and _is_launch(row, problem)]
        timed = [_whole(row) for row in rows if _is_whole(row) and row.extent == problem.extent]
        wholes = {whole.keys: whole for whole in timed}
        summed = desirable_divisions([stock, *launches], problem.extent)
        found = [_timed(division, wholes.pop(division.keys, division).seconds) for division in summed]
        for whole in wholes.values():
            if whole.dim != "batch" or {option.extent for option in whole.options} <= sizes:
                found.append(whole)
        fast = [choice for choice in desirable_set(found) if choice.seconds <= (1 - MARGIN) * stock.seconds]
        undivided = [stock, *(row for row in launches if row.extent == problem.extent)]
        return Choices([Division((stock,)), *fast], undivided)

    def _stock(self, problem: ConvProblem) -> Option | None:
        found = (row for row in self._of(problem) if (row.algorithm, row.extent) == (STOCK, problem.extent))
        return next((replace(row, workspace=0) for row in found), None)

    def _of(self, problem: ConvProblem) -> Sequence[Option]:
        return self.rows.get(canonical(problem.launch_key()), ())


def times(contents: Iterable[tuple[dict[str, Any], Sequence[Option]]]) -> list[RecordedTimes]:
    """The times in a database, by environment. ``contents``: `Store.contents()`."""
    found: dict[str, RecordedTimes] = {}
    for key, options in contents:
        environment = {name: value for name, value in key.items() if name not in _PROBLEM}
        problem = {name: value for name, value in key.items() if name in _PROBLEM}
        entry = found.setdefault(canonical(environment), RecordedTimes(environment, {}))
        entry.rows[canonical(problem)] = options
    return list(found.values())


def _is_launch(row: Option, problem: ConvProblem) -> bool:
    """Whether a row has a launch's workspace: torch's kernel on a whole mini-batch is recorded without one."""
    return row.algorithm != STOCK or (row.extent < problem.extent and row.workspace > 0)


def _is_whole(row: Option) -> bool:
    return row.algorithm.startswith("division ")


def _whole(row: Option) -> Division:
    """The division of a whole, from its name: "division 8:fft+8:fft", "division depth 8:fft+8:fft"."""
    *dims, parts = row.algorithm.split(" ")[1:]
    pairs = [part.partition(":") for part in parts.split("+")]
    seconds = row.seconds / len(pairs)
    return Division(tuple(Option(int(size), name, seconds, row.workspace) for size, _, name in pairs), *dims)


def _timed(division: Division, seconds: float) -> Division:
    """The division at the time it has as a whole, its launches in proportion."""
    factor = seconds / division.seconds if division.seconds > 0 else 1.0
    return Division(tuple(replace(option, seconds=option.seconds * factor) for option in division.options))
