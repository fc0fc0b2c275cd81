"""The known launches of one problem, and the measuring of further ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from mucudnn.convolution.call import Operands, torch_format
from mucudnn.convolution.problem import ConvProblem, Dim, Role, Shape
from mucudnn.convolution.tile import Tile, extent, kinds, tile
from mucudnn.devices import Work, device_of
from mucudnn.optimizer import Division, Option
from mucudnn.providers import STOCK, Provider, stock_result
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.timing import clock
from mucudnn.timing.logbook import Logbook
from mucudnn.timing.schedule import Schedule, rounding_bytes

MOST_SETS = 16  # Sets of operands that a GPU's measurement goes round.

MOST_PARTS = 64
"""Parts of a mini-batch that calls go round: no launch is called as often, while a mini-batch may have thousands."""

ONCE = 1.7
"""A launch is called once only if that takes more than so many times the time at which it would be of interest: what a
first call does beside its work takes less than that."""

Candidate = tuple[Provider, str]


class Measurement:
    """The known and the newly measured launches of one problem.

    Every timed call allocates its result and frees it again, as calls of a program do, so that measuring needs no more
    memory than the program would. On a GPU successive calls read different copies of the operands, which together are
    twice as large as the L2 cache, so that no call finds its operands in that cache.
    """

    def __init__(
        self,
        problem: ConvProblem,
        logbook: Logbook,
        operands: Operands | None = None,
        strides: Shape | None = None,
        device: torch.device | None = None,
        first: float | None = None,
    ) -> None:
        """
        Args:
            logbook: what is known, and where what is measured is kept.
            operands: to measure with, of which nothing is written; made up if not given.
            strides: of the result; those of the target among the operands if not given.
            device: to measure on; that of the host if not given.
            first: seconds of a call of torch's own kernel with the operands, if that was timed.
        """
        self.problem = problem  # The convolution.
        self.logbook = logbook  # Reads known measurements, and records new ones.
        self._given = operands
        self._strides = strides
        self.device = device_of(device or torch.device("cpu"))  # The device on which it measures.
        self._clock = self.device.clock
        self._turns: Iterator[Operands] | None = None
        self._first = first

    @property
    def strides(self) -> Shape:
        """The strides of the result of torch's own kernel."""
        if self._strides is None:
            self._strides = self.turn().target(self.problem).stride()
        return self._strides

    def stock_seconds(self) -> float:
        """Seconds of torch's own kernel on the whole, from the database or measured now."""
        logbook, problem = self.logbook, self.problem
        known = logbook.launches(problem).get((STOCK, problem.extent))
        if known is not None:
            return known.seconds

        def work() -> None:
            stock_result(problem, self.turn())

        if self._given is None:
            seconds = clock.seconds(work, self._clock)
        elif self._first is not None and self._first > clock.BUDGET:
            seconds = self._first
        else:  # whoever gives operands has just seen what torch's own kernel makes of them
            seconds = clock.again_seconds(work, math.inf, self._clock, self._first or 0.0)
        logbook.record(problem, Option(problem.extent, STOCK, seconds, 0))
        return seconds

    def workspace(self, candidate: Candidate, dim: Dim, size: int) -> int | None:
        """Bytes that parts of a size along a dim need at most; `None` where the algorithm does not serve all of them.

        On a GPU the answers are kept in the database: cuDNN can only answer by making a plan, which takes milliseconds.
        """
        provider, algorithm = candidate
        needs = [self._need(provider, algorithm, part) for part in kinds(self.problem, dim, size)]
        found = [need for need in needs if need is not None]
        if len(found) < len(needs):
            return None
        return max(found) + rounding_bytes(self.problem, size < extent(self.problem, dim))

    def seconds(self, candidate: Candidate, dim: Dim, size: int, most: float) -> float:
        """Seconds of a launch, from the database or measured now.

        A first call that takes far more than `most` seconds, or more than `clock.BUDGET`, is the only one. After it
        there is one call, and more of short ones as long as they take at most `most` seconds.

        Successive calls on micro-batches take different samples of the mini-batch, so that no call finds its samples in
        a cache. Of micro-tiles the one in the middle of the tensor is timed: it reads the most rows, as it has
        neighbours on both sides. A launch is recorded under the problem of its part, with that problem's number of
        samples, so that other convolutions with the same part find it.

        Raises:
            LaunchError: where the algorithm fails.
        """
        algorithm, problem = candidate[1], middle(self.problem, dim, size).problem
        known = self.logbook.launches(problem).get((algorithm, problem.extent))
        if known is not None:
            return known.seconds
        workspace = self.workspace(candidate, dim, size)
        assert workspace is not None, "sizes are of parts that the algorithm serves"
        work = self._launching(candidate, dim, size, workspace)
        seconds = clock.first_seconds(work, self._clock)
        if seconds <= min(ONCE * most, clock.BUDGET):
            seconds = clock.again_seconds(work, most, self._clock, 0.0, seconds)
        self.logbook.record(problem, Option(problem.extent, algorithm, seconds, workspace))
        return seconds

    def _launching(self, candidate: Candidate, dim: Dim, size: int, workspace: int) -> Work:
        """The work that times a launch of a size: each call uses the next part."""
        provider, algorithm = candidate
        schedules: dict[ConvProblem, Schedule] = {}
        walk = self._walk(dim, size)
        # The same as in a division: a half-type weight gradient is written to a float32 sum.
        dtype = torch.float32 if rounding_bytes(self.problem, size < extent(self.problem, dim)) else None

        def work() -> None:
            part, operands = next(walk)
            if part.problem not in schedules:
                division = Division((Option(part.problem.extent, algorithm, 0.0, workspace),))
                schedules[part.problem] = Schedule(part.problem, division, {algorithm: provider})
            target = operands.w.new_empty_strided(self.problem.target_shape, self.strides, dtype=dtype)
            whole = replace(operands, **{str(self.problem.target): target})
            schedules[part.problem].run(part.part(whole))

        return work

    def adopt(self, dim: Dim, option: Option) -> None:
        """Keeps a launch that calls of the program have timed."""
        part = middle(self.problem, dim, option.extent).problem
        self.logbook.record_later(part, replace(option, extent=part.extent))

    def turn(self) -> Operands:
        """The next set of operands; nothing of it may be written."""
        if self._turns is None:
            given = self._given or synthetic_operands(self.problem, self.device.place)
            self._turns = itertools.cycle(_sets(given, self.problem, self.device.cache))
        return next(self._turns)

    def _walk(self, dim: Dim, size: int) -> Iterator[tuple[Tile, Operands]]:
        """Parts of a size with the operands that they are of: all of one set, then all of the next."""
        starts = range(0, extent(self.problem, dim) - size + 1, size)[:MOST_PARTS] if dim is Dim.BATCH else ()
        tiles = [tile(self.problem, dim, start, size) for start in starts] or [middle(self.problem, dim, size)]
        while True:
            operands = self.turn()
            yield from ((tile, operands) for tile in tiles)

    def _need(self, provider: Provider, algorithm: str, part: ConvProblem) -> int | None:
        """Bytes that a part needs; `None` where the algorithm does not serve it."""
        if not self.device.uses_cudnn:
            return provider.workspace(part, algorithm) if provider.serves(part, algorithm) else None
        known = self.logbook.needs(part)
        launch = f"{algorithm} of {part.extent} at {part.alignment}"
        if launch not in known:
            try:
                need = provider.workspace(part, algorithm)
            except CudnnError as error:
                if not error.is_lasting:
                    return None
                need = None
            need = need if need is not None and provider.serves(part, algorithm) else None
            self.logbook.record_need(part, launch, need)
            return need
        return known[launch]


def _sets(operands: Operands, problem: ConvProblem, cache: int) -> list[Operands]:
    """The operands and as many copies as overflow a cache of so many bytes."""
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    size = sum(map(math.prod, shapes)) * problem.element_bytes
    count = min(MOST_SETS, -(-2 * cache // size))
    copied = [str(role) for role in Role if role is not problem.target]
    return [
        operands,
        *(replace(operands, **{name: getattr(operands, name).clone() for name in copied}) for _ in range(count - 1)),
    ]


def synthetic_operands(
    problem: ConvProblem, device: torch.device | str = "cpu", make: Callable[..., torch.Tensor] = torch.randn
) -> Operands:
    """Operands of the problem's shapes, types and memory formats, random if not made otherwise, and a target."""
    shapes = {Role.X: problem.x_shape, Role.W: problem.w_shape, Role.Y: problem.y_shape}
    tensors = {}
    for (role, shape), name in zip(shapes.items(), problem.formats, strict=True):
        tensor = make(shape, device=device).to(getattr(torch, problem.dtype))
        tensors[str(role)] = tensor.contiguous(memory_format=torch_format(name, tensor.dim()))
    return Operands(**tensors)


def middle(problem: ConvProblem, dim: Dim, size: int) -> Tile:
    """The part in the middle of a spatial dim, or the first of the mini-batch, where the place makes no difference."""
    return tile(problem, dim, 0 if dim is Dim.BATCH else (extent(problem, dim) - size) // 2, size)
