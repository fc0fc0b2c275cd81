"""Offers: which algorithms are tried along which dims of a problem, and in parts of which sizes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import dims, extent
from mucudnn.optimizer import micro_batch_sizes
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import is_too_large
from mucudnn.providers.strips import strips_of
from mucudnn.timing.measurement import Candidate, Measurement, middle

Task = tuple[Dim, str]
"""A dim and an algorithm that is tried along it."""

WIDTHS = 3
"""Of an algorithm that only serves in strips within the limit, so many widths are tried."""


class Offers:
    """The algorithms of some providers.

    On a processor they are named for parts along each dim, and what these need tells at once along which dims, and in
    which strips, each is tried (`within`). On a GPU every such answer of cuDNN's takes a plan. So there an algorithm is
    named for the whole and tried along the mini-batch (`along_batch`), then, if one sample is too large for it, along
    space (`along_space`), and if the smallest tile is, too, in strips (`in_strips`).

    Attributes:
        are_plans_costly: whether providers can only tell what a part needs by making a plan, as on a GPU.
    """

    def __init__(self, providers: Sequence[Provider], are_plans_costly: bool) -> None:
        self._providers, self.are_plans_costly = providers, are_plans_costly

    def candidates(self, problem: ConvProblem, dim: Dim) -> list[Candidate]:
        """Who serves parts of the problem along a dim, by which algorithms; where plans are costly, who may."""
        is_whole = dim is Dim.BATCH or self.are_plans_costly
        part = problem if is_whole else middle(problem, dim, extent(problem, dim) // 2).problem
        return [(provider, name) for provider in self._providers for name in provider.algorithms(part)]

    def providers(self, problem: ConvProblem) -> dict[str, Provider]:
        """Who serves the problem or parts of it, by algorithm."""
        found: dict[str, Provider] = {}
        for dim in dims(problem):
            found |= {algorithm: provider for provider, algorithm in self.candidates(problem, dim)}
            for candidate in self.candidates(problem, dim):
                found |= {strips.name: strips for strips in strips_of(problem, dim, *candidate)}
        return found

    def within(self, measurement: Measurement, allowed: float) -> dict[Task, Candidate]:
        """Who serves parts of a problem along which dim, within so many bytes or not.

        An algorithm of which the smallest part along any one dim needs more is offered on strips along a second dim: on
        the widest that fit beneath the smallest part along the first, on half of these, and on a quarter.
        """
        problem = measurement.problem
        found = {(dim, one[1]): one for dim in dims(problem) for one in self.candidates(problem, dim)}
        least: dict[str, float] = {}
        for (dim, name), one in found.items():
            need = measurement.workspace(one, dim, 1)
            least[name] = min(least.get(name, math.inf), math.inf if need is None else need)
        for (dim, name), one in [*found.items()]:
            if name != STOCK and allowed < least[name] < math.inf:
                every = ((strips, strips.name) for strips in strips_of(problem, dim, *one))
                fit = [strips for strips in every if fitting(measurement, strips, dim, allowed, [1])]
                found |= {(dim, strips[1]): strips for strips in fit[:WIDTHS]}
        return found

    def along_batch(self, problem: ConvProblem) -> dict[Task, Candidate]:
        """Who may serve micro-batches."""
        return {(Dim.BATCH, one[1]): one for one in self.candidates(problem, Dim.BATCH)}

    def along_space(self, measurement: Measurement, allowed: float, names: Sequence[str]) -> list[Task]:
        """Which algorithms are tried on micro-tiles, of those that one sample is too large for."""
        return [(dim, name) for dim in dims(measurement.problem)[1:] for name in names]

    def in_strips(self, measurement: Measurement, allowed: float, names: Sequence[str]) -> list[Task]:
        """Which algorithms are tried on strips of samples that are too large for them, or of tiles, where there is one
        sample or where it is too large for cuDNN's numbers.

        The widest strips are chosen that would fit within so many bytes if these were in proportion to the width.
        """
        problem = measurement.problem
        is_by_sample = problem.extent > 1 and not is_too_large(problem.with_extent(1))
        dim = Dim.BATCH if is_by_sample else dims(problem)[-1]
        found: list[Task] = []
        for one in self.candidates(problem, Dim.BATCH):
            need = measurement.workspace(one, dim, 1) if one[1] in names else None
            if need is not None:
                every = strips_of(problem, dim, *one)
                widths = (strips for strips in every if need * strips.size <= allowed * extent(problem, strips.dim))
                found += [(dim, strips.name) for strips in itertools.islice(widths, 1)]
        return found

    @property
    def plans_made(self) -> int:
        """How many plans cuDNN was asked for so far."""
        return sum(provider.plans_made for provider in self._providers if isinstance(provider, Engines))

    def named(self, problem: ConvProblem, tasks: Collection[Task]) -> dict[Task, Candidate]:
        """Who serves tasks by their names; those that are not offered, or not any more, are left out."""
        providers = self.providers(problem)
        return {task: (providers[task[1]], task[1]) for task in tasks if task[1] in providers}


def sizes_of(problem: ConvProblem, candidate: Candidate, dim: Dim, policy: str) -> set[int]:
    """The sizes that a policy tries; the whole is left out where another trial computes it in the same way."""
    whole = extent(problem, dim)
    sizes = set(micro_batch_sizes(policy, whole))
    return sizes - {whole} if candidate[1] == STOCK or dim is not Dim.BATCH else sizes


def fitting(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, sizes: Iterable[int]
) -> dict[int, int]:
    """{size: bytes of workspace}, for those of the sizes whose parts the candidate serves within a limit."""
    needs = {size: measurement.workspace(candidate, dim, size) for size in sizes}
    return {size: need for size, need in needs.items() if need is not None and need <= allowed}


def fitting_sizes(
    measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, policy: str
) -> dict[int, int]:
    """The sizes that a policy tries, as `fitting`.

    Tiles overlap, so the best use of a limit is as few tiles as possible, of equal size: this size is tried, too.
    """
    problem = measurement.problem
    found = fitting(measurement, candidate, dim, allowed, sizes_of(problem, candidate, dim, policy))
    if dim is not Dim.BATCH and found:
        whole = extent(problem, dim)

        def is_too_large(size: int) -> bool:
            return not fitting(measurement, candidate, dim, allowed, [size])

        largest = bisect_left(range(whole), True, lo=max(found) + 1, key=is_too_large) - 1
        even = -(-whole // -(-whole // largest))
        found |= fitting(measurement, candidate, dim, allowed, [even])
    return found
