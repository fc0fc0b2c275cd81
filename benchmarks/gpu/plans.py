"""The plans of one convolution, from its measured launches: numbers in, decisions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mucudnn.optimizer import Division, Option, desirable_divisions
from mucudnn.providers import STOCK

TOLERANCE = 1.02
"""Within this factor of the unlimited time counts as no slower."""


@dataclass(frozen=True)
class Plans:
    """The desirable divisions, of the undivided mini-batch and of any micro-batches that were measured.

    Torch's own kernel is not among the launches: what scratch memory it takes is not known, so it fits no limit.
    """

    undivided: list[Division]
    divided: list[Division]

    @classmethod
    def of(cls, options: Iterable[Option], extent: int) -> Plans:
        launches = [option for option in options if option.algorithm != STOCK]
        whole = [option for option in launches if option.extent == extent]
        return cls(desirable_divisions(whole, extent), desirable_divisions(launches, extent))

    def within(self, limit: float) -> tuple[Division | None, Division | None]:
        """The fastest undivided plan and the fastest plan within a limit in bytes; None where nothing fits."""
        return _fastest(self.undivided, limit), _fastest(self.divided, limit)

    def needed(self) -> dict[str, int | None]:
        """Bytes that each kind of plan needs to take at most `TOLERANCE` times the best undivided plan's time."""
        if not self.undivided:
            return {"undivided": None, "divided": None}
        target = TOLERANCE * self.undivided[-1].seconds
        return {"undivided": _least(self.undivided, target), "divided": _least(self.divided, target)}


def _fastest(front: Sequence[Division], limit: float) -> Division | None:
    """A front is in ascending workspace and descending time."""
    return next((division for division in reversed(front) if division.workspace <= limit), None)


def _least(front: Sequence[Division], seconds: float) -> int | None:
    return next((division.workspace for division in front if division.seconds <= seconds), None)


def described(division: Division) -> dict[str, Any]:
    """A division as plain values, without its measured time."""
    parts = groupby(division.options, key=lambda option: (option.algorithm, option.extent))
    runs = [(len(list(group)), algorithm, extent) for (algorithm, extent), group in parts]
    return {
        "division": " + ".join(f"{f'{count}x' if count > 1 else ''}{name}({extent})" for count, name, extent in runs),
        "predicted": division.seconds,
        "workspace": division.workspace,
    }
