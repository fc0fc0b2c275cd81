"""Computes a part by another algorithm strip by strip, so that the convolution is cut along two dims."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache

from mucudnn.convolution.problem import ConvProblem, Dim, Role
from mucudnn.convolution.tile import Part, Tile, extent, is_divisible, problems, tiles
from mucudnn.providers.provider import Effort, Provider
from mucudnn.providers.stock import STOCK


class Strips(Provider):
    """An algorithm of another provider on strips of some rows, columns or planes along a second dim.

    The name "fft@height=8" means strips of at most 8 along the height, as even as they can be.

    Attributes:
        name: of the algorithm on strips.
        dim: that is cut into strips.
        size: of a strip along it at most.
    """

    def __init__(self, provider: Provider, algorithm: str, dim: Dim, size: int) -> None:
        self._provider, self._algorithm, self.dim, self.size = provider, algorithm, dim, size
        self.name = f"{algorithm}@{dim}={size}"

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return (self.name,) if self.serves(problem, self.name) else ()

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        # A half-type gradient of the weight would be rounded once per strip.
        if not is_divisible(problem, self.dim) or (problem.is_half and problem.target is Role.W):
            return False
        return all(self._provider.serves(strip, self._algorithm) for strip in self.problems(problem))

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        return max(self._provider.workspace(strip, self._algorithm) for strip in self.problems(problem))

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        total = Effort()
        for strip, times in self.problems(problem).items():
            total = total.plus(self._provider.effort(strip, self._algorithm, count * times) or Effort())
        return total

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            strips = [strip.part(part) for strip in _strips(part.problem, self.dim, self.size)]
            self._provider.launch(self._algorithm, strips, accumulate)
            accumulate = part.problem.target is Role.W

    def problems(self, problem: ConvProblem) -> Mapping[ConvProblem, int]:
        """The problems of a problem's strips, and how many strips each is of."""
        return _problems(problem, self.dim, self.size)


@lru_cache(maxsize=32)  # a part is asked for several times in a row; more would make garbage collections longer
def _problems(problem: ConvProblem, dim: Dim, size: int) -> Mapping[ConvProblem, int]:
    """The distinct problems of strips, and how many strips each is of."""
    return problems(problem, dim, _sizes(problem, dim, size))


@lru_cache(maxsize=1024)
def _strips(problem: ConvProblem, dim: Dim, size: int) -> tuple[Tile, ...]:
    return tuple(tiles(problem, dim, _sizes(problem, dim, size)))


def _sizes(problem: ConvProblem, dim: Dim, size: int) -> list[int]:
    """The fewest possible strips, of one size but for the last."""
    whole = extent(problem, dim)
    even = -(-whole // -(-whole // size))
    rest = whole % even
    return [even] * (whole // even) + [rest] * (rest > 0)


def strips_of(problem: ConvProblem, dim: Dim, provider: Provider, algorithm: str) -> list[Strips]:
    """Parts along a dim in strips along the next dim, the widest first; empty where that cannot be cut."""
    names = (Dim.BATCH, *problem.spatial_dims)
    across = dict(itertools.pairwise(names)).get(dim)
    if across is None or algorithm == STOCK or not is_divisible(problem, across):
        return []
    powers = range((extent(problem, across) - 1).bit_length())
    return [Strips(provider, algorithm, across, 1 << power) for power in reversed(powers)]
