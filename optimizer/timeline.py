"""Peak-neutral budgets: the workspace that each convolution may use without raising the peak memory of a step.

A workspace exists only while its convolution runs. So a convolution may use the difference between the step's peak and
the memory that is alive when it runs, without raising the peak. This budget is small near the peak and large elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The memory of one step.

    Attributes:
        live: bytes alive at each convolution in the order of the calls, its result among them.
        peak: bytes, the most that was alive at any moment of the step.

    Raises:
        ValueError: for a moment above the peak.
    """

    live: tuple[int, ...]
    peak: int

    def __post_init__(self) -> None:
        if self.live and max(self.live) > self.peak:
            raise ValueError(f"peak={self.peak}: {max(self.live)} bytes were alive at one moment")

    def budgets(self, limit: float = math.inf) -> tuple[int, ...]:
        """Bytes of workspace for each convolution, so that the step stays within its peak, or within a given limit."""
        ceiling = self.peak if limit == math.inf else math.floor(limit)
        return tuple(max(0, ceiling - live) for live in self.live)


def common(timelines: Sequence[StepTimeline]) -> StepTimeline:
    """A timeline whose budgets suit each of several steps of the same convolutions.

    Steps may differ in what else is alive, for example accumulated gradients. So the least peak is taken and, at each
    moment, the most that was alive: budgets made of these raise the peak of none of the steps.

    Raises:
        ValueError: for no timeline, or for timelines of different lengths.
    """
    if len({len(timeline.live) for timeline in timelines}) != 1:
        raise ValueError("timelines of one step have one length")
    live = tuple(map(max, zip(*(timeline.live for timeline in timelines), strict=True)))
    peak = min(timeline.peak for timeline in timelines)
    return StepTimeline(tuple(min(moment, peak) for moment in live), peak)
