"""Measurement: the launches of one problem that are known, and how more become known."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Role, Shape
from mucudnn.convolution.tile import Tile, extent, tile
from mucudnn.optimizer import Division, Option
from mucudnn.providers import STOCK, Provider, stock_result
from mucudnn.timing import clock
from mucudnn.timing.board import Alone, Board
from mucudnn.timing.environment import Environment
from mucudnn.timing.schedule import LaunchError, Schedule, rounding_bytes
from mucudnn.timing.store import Launches, Store

MOST_SETS = 16
"""Sets of operands that a GPU's measurement goes round."""

_log = logging.getLogger("mucudnn")

Candidate = tuple[Provider, str]


class Measurement:
    """The known and the newly measured launches of one problem.

    Every timed call makes its result anew and drops it, as calls of a program do: so that measuring holds no more
    memory than they. On a GPU the calls take copies of the operands in turn, twice the L2 cache in all, so that none
    finds its operands there.
    """

    def __init__(
        self,
        problem: ConvProblem,
        environment: Environment,
        store: Store,
        operands: Operands | None = None,
        strides: Shape | None = None,
        device: torch.device | None = None,
        board: Board | None = None,
    ) -> None:
        """
        Args:
            operands: to measure with, of which nothing is written; made up if not given.
            strides: of the result; those of the target among the operands if not given.
            device: to measure on; that of the host if not given.
            board: where others post what they have measured.
        """
        self.problem = problem
        self._environment = environment
        self._store = store
        self._known: dict[ConvProblem, Launches] = {}
        self._given = operands
        self._strides = strides
        self._device = device or torch.device("cpu")
        self._clock = clock.clock_of(self._device)
        self._board = board or Alone()
        self._turns: Iterator[Operands] | None = None
        self._stock_seconds: float | None = None

    def elsewhere(self, device: torch.device) -> Measurement:
        """The same on another device of the same kind, with operands of its own."""
        given = None
        if self._given is not None:
            tensors: dict[str, Any] = {str(role): getattr(self._given, role) for role in Role}
            moved: dict[str, Any] = {name: t if t is None else t.to(device) for name, t in tensors.items()}
            given = replace(self._given, **moved)
        found = Measurement(self.problem, self._environment, self._store, given, self._strides, device)
        found._stock_seconds = self.stock_seconds()
        return found

    @property
    def key(self) -> dict[str, Any]:
        """What the times depend on, plain values."""
        return {**self._key(self.problem), "extent": self.problem.extent}

    def stock_seconds(self) -> float:
        """Seconds of torch's own kernel on the whole."""
        if self._stock_seconds is None:
            self._stock_seconds = self._once(
                STOCK, 0, lambda: clock.seconds(lambda: stock_result(self.problem, self._turn()), self._clock)
            )
        return self._stock_seconds

    def option(self, candidate: Candidate, dim: Dim, size: int, abandon: float) -> Option | None:
        """A launch, `None` where the algorithm fails; timed once only if that takes `abandon` seconds or very long.

        Of a micro-tile the middle is timed, which has most neighbours to read. It is kept as a launch of its own
        problem, over all samples.
        """
        provider, algorithm = candidate
        workspace = workspace_of(self.problem, candidate, dim, size)
        assert workspace is not None, "sizes are of parts that the algorithm serves"
        cut = middle(self.problem, dim, size)
        known = self._launches(cut.problem).get((algorithm, cut.problem.extent))
        if known is not None:
            return Option(size, algorithm, known.seconds, workspace)
        samples = cut.problem.extent
        division = Division((Option(samples, algorithm, 0.0, workspace),))
        schedule = Schedule(cut.problem, Dim.BATCH, division, {algorithm: provider})

        def work() -> None:
            schedule.run(cut.part(self._fresh()).operands)

        try:
            seconds = clock.first_seconds(work, self._clock)
            if seconds <= min(abandon, clock.BUDGET):
                seconds = clock.seconds(work, self._clock)
        except LaunchError as error:
            _log.warning("%s %s: not usable: %s", self.problem.direction, self.problem, error)
            return None
        self._record(cut.problem, Option(samples, algorithm, seconds, workspace))
        return Option(size, algorithm, seconds, workspace)

    def division_seconds(self, dim: Dim, division: Division, schedule: Schedule) -> float:
        """Seconds of a division: its time in units of torch's own kernel's, both run in turn, times that on record.

        It is kept as a launch of its own, named by its parts.

        Raises:
            LaunchError: where one of the algorithms fails.
        """
        parts = "+".join(f"{option.extent}:{option.algorithm}" for option in division.options)
        name = f"division {parts}" if dim is Dim.BATCH else f"division {dim} {parts}"

        def measure() -> float:
            ratio = clock.ratio(
                lambda: schedule.run(self._fresh()), lambda: stock_result(self.problem, self._turn()), self._clock
            )
            return ratio * self.stock_seconds()

        return self._once(name, division.workspace, measure)

    def adopt(self, dim: Dim, option: Option) -> None:
        """Keeps a launch that another measurement of the problem has found."""
        cut = middle(self.problem, dim, option.extent)
        self._record(cut.problem, replace(option, extent=cut.problem.extent))

    def _once(self, name: str, workspace: int, measure: Callable[[], float]) -> float:
        """Seconds of work on the whole, one number for all who share the board."""
        known = self._launches(self.problem).get((name, self.problem.extent))
        seconds = self._board.once({**self.key, "work": name}, measure if known is None else lambda: known.seconds)
        if known is None or known.seconds != seconds:
            self._record(self.problem, Option(self.problem.extent, name, seconds, workspace))
        return seconds

    def _record(self, problem: ConvProblem, option: Option) -> None:
        self._launches(problem)[option.algorithm, option.extent] = option
        self._store.record(self._key(problem), [option])

    def _turn(self) -> Operands:
        """Operands to read."""
        if self._turns is None:
            given = self._given or synthetic_operands(self.problem, self._device)
            self._turns = itertools.cycle(_sets(given, self.problem, self._device))
        return next(self._turns)

    def _fresh(self) -> Operands:
        """Operands with a new target."""
        given = self._turn()
        strides = given.target(self.problem).stride() if self._strides is None else self._strides
        target = given.w.new_empty_strided(self.problem.target_shape, strides)
        return replace(given, **{str(self.problem.target): target})

    def _launches(self, problem: ConvProblem) -> Launches:
        if problem not in self._known:
            self._known[problem] = self._store.launches(self._key(problem))
        return self._known[problem]

    def _key(self, problem: ConvProblem) -> dict[str, Any]:
        return {**problem.launch_key(), **self._environment.launch_key()}


def _sets(operands: Operands, problem: ConvProblem, device: torch.device) -> list[Operands]:
    """The operands and as many copies as overflow the device's cache; on the host, which has no such habit, none."""
    if device.type != "cuda":
        return [operands]
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    size = sum(map(math.prod, shapes)) * problem.element_bytes
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MOST_SETS, -(-2 * cache // size))
    copied = [str(role) for role in Role if role is not problem.target]
    return [
        operands,
        *(replace(operands, **{name: getattr(operands, name).clone() for name in copied}) for _ in range(count - 1)),
    ]


def synthetic_operands(problem: ConvProblem, device: torch.device | str = "cpu") -> Operands:
    """Random operands of the problem's shapes, types and memory formats, and a target."""
    shapes = {Role.X: problem.x_shape, Role.W: problem.w_shape, Role.Y: problem.y_shape}
    memory_formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    tensors = {}
    for (role, shape), name in zip(shapes.items(), problem.formats, strict=True):
        tensor = torch.randn(shape, device=device).to(getattr(torch, problem.dtype))
        if name == "channels_last":
            tensor = tensor.contiguous(memory_format=memory_formats[tensor.dim()])
        tensors[str(role)] = tensor
    return Operands(**tensors)


def middle(problem: ConvProblem, dim: Dim, size: int) -> Tile:
    """A part with neighbours on both sides; of the mini-batch, where it makes no difference, the first."""
    return tile(problem, dim, 0 if dim is Dim.BATCH else (extent(problem, dim) - size) // 2, size)


def workspace_of(problem: ConvProblem, candidate: Candidate, dim: Dim, size: int) -> int | None:
    """Bytes of the largest launch of the size: at the edges or, at any phase of the stride, between them.

    None where the algorithm does not serve all of them.
    """
    provider, algorithm = candidate
    starts = {0}
    if dim is not Dim.BATCH:
        room = extent(problem, dim) - size
        starts |= {room, *range(room // 2, min(room, room // 2 + problem.stride[0]))}
    parts = {tile(problem, dim, start, size).problem for start in starts}
    if not all(provider.serves(part, algorithm) for part in parts):
        return None
    return max(provider.workspace(part, algorithm) for part in parts) + rounding_bytes(problem)
