"""A division that is ready to compute any operands of its problem's shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Role
from mucudnn.convolution.tile import Tile, tiles
from mucudnn.convolution.verdict import SAMPLE, verdict
from mucudnn.devices import device_of
from mucudnn.optimizer import Division
from mucudnn.providers import STOCK, Provider


class LaunchError(RuntimeError):
    """An algorithm failed while it ran."""

    def __init__(self, algorithm: str, extent: int, cause: BaseException) -> None:
        part = f" on a part of {extent}" if extent else ""
        super().__init__(f"{algorithm}{part}: {str(cause).splitlines()[0] if str(cause) else cause!r}")
        self.algorithm = algorithm  # The name of the algorithm.
        self.extent = extent
        """Samples, or rows, of the largest part it was given; 0 where it fails on parts of any size."""


class WrongResult(LaunchError):
    """An algorithm computed something wrong, so that none of its launches is to be used, of whatever extent."""

    def __init__(self, algorithm: str, faults: Mapping[str, str]) -> None:
        super().__init__(algorithm, 0, ValueError(f"it computed {faults[algorithm]}"))
        self.faults = faults  # Descriptions of wrong results, by algorithm.


class PartRun(NamedTuple):
    """Consecutive parts by one algorithm."""

    algorithm: str
    provider: Provider
    tiles: tuple[Tile, ...]
    accumulate: bool
    ready: Callable[[Operands], bool] | None  # The launch made ready, where the provider does that.

    def launch(self, operands: Operands) -> None:
        """Computes the parts. Raises LaunchError where the algorithm fails."""
        try:
            if self.ready is None or not self.ready(operands):
                with _BeneathTransforms():
                    self.provider.launch(self.algorithm, [tile.part(operands) for tile in self.tiles], self.accumulate)
        except (RuntimeError, MemoryError) as error:
            raise LaunchError(self.algorithm, max(tile.extent for tile in self.tiles), error) from error


@dataclass(frozen=True)
class Schedule:
    """A division that is ready to run: its parts one after the other, each by its algorithm, into one result."""

    problem: ConvProblem  # The convolution.
    division: Division  # The algorithms and the sizes of the parts.
    providers: Mapping[str, Provider] = field(compare=False, repr=False)
    """By algorithm, at least those in the division."""

    @cached_property
    def _runs(self) -> Sequence[PartRun]:
        runs: list[PartRun] = []
        start = 0
        for algorithm, extents in self.division.runs():
            accumulate = self.problem.target is Role.W and start > 0
            parts = tuple(tiles(self.problem, Dim(self.division.dim), extents, start))
            runs.append(_run(algorithm, self.providers[algorithm], parts, accumulate))
            start += sum(extents)
        return runs

    @cached_property
    def launch(self) -> Callable[[Operands], None]:
        """`run` as a function, which calls the algorithm directly where the division is one launch."""
        return self._runs[0].launch if len(self._runs) == 1 and not self._rounding else self.run

    @property
    def name(self) -> str:
        """The key of the whole's time: "division 8:fft+8:fft", "division depth 8:fft+8:fft"."""
        parts = "+".join(f"{option.extent}:{option.algorithm}" for option in self.division.options)
        dim = self.division.dim
        return f"division {parts}" if dim == Dim.BATCH else f"division {dim} {parts}"

    @cached_property
    def _singly(self) -> Sequence[PartRun]:
        """Every part by itself."""
        sums = self.problem.target is Role.W
        tiles = ((run, tile) for run in self._runs for tile in run.tiles)
        return [
            _run(run.algorithm, run.provider, (tile,), sums and number > 0) for number, (run, tile) in enumerate(tiles)
        ]

    @cached_property
    def _rounding(self) -> int:
        return rounding_bytes(self.problem, len(self.division.options) > 1)

    def workspaces(self) -> Iterator[int]:
        """Bytes of each launch: parts at an edge, or at an odd address, may differ in them.

        Raises:
            LaunchError: where an algorithm does not serve a part after all.
        """
        for run in self._runs:
            for tile in run.tiles:
                try:
                    yield run.provider.workspace(tile.problem, run.algorithm) + self._rounding
                except RuntimeError as error:
                    raise LaunchError(run.algorithm, tile.extent, error) from error

    @property
    def seams(self) -> list[tuple[int, int]]:
        """The boundaries between parts of the target, as (tensor dim, index of the first element behind)."""
        if self.problem.target is Role.W:
            return []
        tiles = [tile for run in self._runs for tile in run.tiles]
        places = (tile.x if self.problem.target is Role.X else tile.y for tile in tiles)
        return [(tile.at, place[0]) for tile, place in zip(tiles, places, strict=True) if place[0]]

    def by(self, place: Sequence[int]) -> set[str]:
        """The algorithms that may have computed an element of the target."""
        names = [option.algorithm for option in self.division.options]
        if self.problem.target is Role.W:
            return set(names) - {STOCK} or set(names)
        ends = itertools.accumulate(option.extent for option in self.division.options)
        at = place[0 if self.division.dim == Dim.BATCH else 2]
        return {next(name for name, end in zip(names, ends, strict=True) if at < end)}

    def run(self, operands: Operands, lap: Callable[[], object] | None = None) -> None:
        """Computes the problem's target.

        Args:
            operands: of the whole; the target is overwritten.
            lap: called after every part, each then being a launch of its own.

        Raises:
            LaunchError: where an algorithm fails; the target's contents are then undefined.
        """
        result = operands.w
        if self._rounding:
            operands = replace(operands, w=torch.empty_like(result, dtype=torch.float32))
        for run in self._runs if lap is None else self._singly:
            run.launch(operands)
            if lap is not None:
                lap()
        if operands.w is not result:
            with _BeneathTransforms():
                result.copy_(operands.w)


def _run(algorithm: str, provider: Provider, tiles: tuple[Tile, ...], accumulate: bool) -> PartRun:
    return PartRun(algorithm, provider, tiles, accumulate, provider.ready(algorithm, tiles, accumulate))


def rounding_bytes(problem: ConvProblem, is_divided: bool) -> int:
    """Bytes beside an algorithm's own that a half-type weight gradient in parts takes.

    The parts add up in float32, and the sum is rounded once at the end. An algorithm that writes half types only needs
    room for its part's result, too.
    """
    if is_divided and problem.is_half and problem.target is Role.W:
        return (4 + problem.element_bytes) * math.prod(problem.w_shape)
    return 0


def compare_results(
    schedule: Schedule, operands: Operands, other: torch.Tensor | None, by: str = STOCK, sample: int = SAMPLE
) -> dict[str, str] | None:
    """Compares the schedule's result with another one: the faults by algorithm, empty where there are none.

    `None` where the operands are not finite, so that nothing can be compared.

    Args:
        operands: what was computed from, the schedule's result among them.
        other: what another algorithm makes of the operands; without it only a sample is looked at.
        by: that algorithm.
        sample: elements that are looked at in any case, at most.

    Raises:
        WrongResult: where an algorithm of the schedule is wrong, or `by`, if that is not torch's own kernel.
    """
    problem, precision = schedule.problem, device_of(operands.w.device).precision
    with _BeneathTransforms():
        found = verdict(problem, operands, operands.target(problem), other, precision, schedule.seams, sample)
    if found is None:
        return None
    fault, others = found
    faults = {} if fault is None else {algorithm: str(fault) for algorithm in schedule.by(fault.place)}
    faults |= {} if others is None else {by: str(others)}
    for algorithm in (*(algorithm for algorithm, _ in schedule.division.runs()), *({by} - {STOCK})):
        if algorithm in faults:
            raise WrongResult(algorithm, faults)
    return faults


class _BeneathTransforms:
    """Calls go straight to the backend: no autograd, and no autocast of what an algorithm computes with.

    A backward pass may run while its caller's autocast is still on.
    """

    def __enter__(self) -> None:
        self._guards: list[Any] = [torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)]
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exception: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*exception)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(torch._C.DispatchKey.AutocastCUDA)
