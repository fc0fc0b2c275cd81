"""An option is an algorithm on a micro-batch; a division is a sequence of options that make up the mini-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

Key = tuple[str, str, int]  # (dim, algorithm, extent): a call, whatever its time.


@dataclass(frozen=True, slots=True)
class Option:
    """One call: an algorithm applied to a micro-batch.

    Attributes:
        extent: samples in the micro-batch, at least 1.
        algorithm: the algorithm's name.
        seconds: the call's time, finite and not negative.
        workspace: the call's scratch memory in bytes, not negative.

    Raises:
        ValueError: for a value outside these ranges.
    """

    extent: int
    algorithm: str
    seconds: float
    workspace: int

    def __post_init__(self) -> None:
        if self.extent < 1:
            raise ValueError(f"extent={self.extent}: a call takes at least 1 sample")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds={self.seconds}: a time is finite and not negative")
        if self.workspace < 0:
            raise ValueError(f"workspace={self.workspace}: bytes are not negative")


@dataclass(frozen=True, slots=True)
class Division:
    """A mini-batch as a sequence of calls, one after the other, that share one workspace.

    Time adds up over the calls; the workspace is that of the largest (mu-cuDNN, Oyama et al. 2018, section III-A).

    Attributes:
        dim: what is divided, if not the mini-batch: extents are then rows of that dim.
    """

    options: tuple[Option, ...]
    dim: str = "batch"

    @property
    def extent(self) -> int:
        """Samples in all parts together."""
        return sum(option.extent for option in self.options)

    @property
    def seconds(self) -> float:
        """The sum of the parts' times."""
        return sum(option.seconds for option in self.options)

    @property
    def workspace(self) -> int:
        """Bytes: the maximum over the parts."""
        return max((option.workspace for option in self.options), default=0)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key of every part."""
        return tuple((self.dim, option.algorithm, option.extent) for option in self.options)

    def runs(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parts with neighbours of one algorithm put together: ((algorithm, (extent, ...)), ...)."""
        return tuple(
            (algorithm, tuple(option.extent for option in group))
            for algorithm, group in groupby(self.options, key=lambda option: option.algorithm)
        )
