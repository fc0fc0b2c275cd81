"""Planner: a problem and a limit in, the fastest measured division out."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Shape
from mucudnn.convolution.tile import dims, extent
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Option, micro_batch_sizes
from mucudnn.planning.plan import MARGIN, Plan, best, surviving
from mucudnn.providers import STOCK, Provider, providers_on
from mucudnn.settings import Settings
from mucudnn.timing import progress
from mucudnn.timing.board import Board
from mucudnn.timing.environment import Environment
from mucudnn.timing.logbook import Logbook
from mucudnn.timing.measurement import Candidate, Measurement, middle
from mucudnn.timing.schedule import LaunchError, Schedule
from mucudnn.timing.store import Store
from mucudnn.timing.survey import Survey, Worker

PARTS_MARGIN = 0.15
"""As `MARGIN`, for a division whose parts are all computed by torch's own kernel. The parts compute in the same way as
the whole, so a small gain may only mean that caches and allocator were in a better state when they were timed."""

LEAST_SECONDS = 1e-4
"""Convolutions that torch's own kernel computes in less than this are left to it: to call an algorithm from Python
costs about as much time."""

HOPELESS = 3.0
"""An algorithm is first timed at its smallest micro-batch and at one that takes torch about `PROBE_SECONDS`. If at both
it takes more than this many times torch's time per sample, it is not timed at other sizes."""

PROBE_SECONDS = 0.25

ATTEMPTS = 3
"""Divisions that are compared with torch's own kernel. If none of them is faster, that kernel is kept."""

HOST = torch.device("cpu")

_log = logging.getLogger("mucudnn")


class Planner:
    """Measures what the database does not know yet, then decides.

    Attributes:
        device: where the problems are.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        providers: Sequence[Provider] | None = None,
        device: torch.device = HOST,
        board: Board | None = None,
    ) -> None:
        """
        Args:
            providers: of algorithms; those of the device if not given.
            device: where the problems are.
            board: where other processes with the same program post what they measure.

        Raises:
            Unavailable: where cuDNN cannot be used, for a GPU.
        """
        self._settings = settings
        self._store = store
        self.device = device
        self._board = board
        self._providers = providers_on(device, settings.engines) if providers is None else providers
        wanted = settings.benchmark_devices
        self._peers = [
            Planner(replace(settings, benchmark_devices=None), store, device=peer)
            for peer in (() if wanted is None else device_of(device).peers(wanted))
        ]

    @property
    def engines(self) -> str:
        """Which engines of cuDNN are tried, the setting's name of them."""
        return self._settings.engines

    def providers(self, problem: ConvProblem) -> dict[str, Provider]:
        """Who serves the problem or parts of it, by algorithm."""
        found: dict[str, Provider] = {}
        for dim in dims(problem):
            found |= {algorithm: provider for provider, algorithm in self.candidates(problem, dim)}
        return found

    def measurement(
        self,
        problem: ConvProblem,
        operands: Operands | None = None,
        strides: Shape | None = None,
    ) -> Measurement:
        """What is known of a problem under the present environment, and the means to measure the rest.

        Args:
            problem: the convolution.
            operands: tensors to measure with, of which nothing is written; made up if not given.
            strides: of the result; those of the target among the operands if not given.
        """
        logbook = Logbook(Environment.current(self.device), self._store, self._board)
        return Measurement(problem, logbook, operands, strides, self.device)

    def plan(self, measurement: Measurement, limit: float | None = None) -> Plan:
        """The fastest division of a problem within a limit.

        Args:
            limit: bytes of workspace; that of the settings if not given.
        """
        problem = measurement.problem
        stock = self.measured(measurement, self._settings.workspace_limit if limit is None else limit)
        plan = self._fastest(measurement, stock)
        if len(plan.division.options) > 1:
            whole = [option for option in stock.options.get(Dim.BATCH, ()) if option.extent == problem.extent]
            undivided = self._fastest(measurement, replace(stock, options={Dim.BATCH: whole}))
            divided = replace(plan, undivided_seconds=undivided.seconds)
            plan = min(replace(undivided, options=stock.options), divided, key=lambda plan: plan.seconds)
        plan = replace(plan, whole_workspace=self.whole_workspace(plan))
        _log.info("%s %s: %s %s", problem.direction, problem, plan.dim, plan.division.runs())
        return plan

    def whole_workspace(self, plan: Plan) -> int:
        """What the division's algorithms other than torch's own would need undivided."""
        whole = {name: provider for provider, name in self.candidates(plan.problem, Dim.BATCH) if name != STOCK}
        used = {algorithm for algorithm, _ in plan.division.runs()}
        return max((whole[name].workspace(plan.problem, name) for name in used & whole.keys()), default=0)

    def _fastest(self, measurement: Measurement, stock: Plan) -> Plan:
        """The fastest division made of a plan's options that proves faster than torch's own kernel, or else that."""
        problem, limit, stock_seconds = stock.problem, stock.limit, stock.stock_seconds
        options = {**stock.options}
        for _ in range(ATTEMPTS):
            dim, division = best(problem, options, stock_seconds, limit)
            attempt = stock.divided(dim, division)
            if attempt.is_stock:
                break
            try:
                larger = _enlarged(options[dim], division, attempt.schedule.workspaces)
                if larger != options[dim]:
                    options[dim] = larger
                    continue
                seconds = measurement.division_seconds(attempt.schedule)
            except LaunchError as error:
                _log.warning("%s %s: %s", problem.direction, problem, error)
                options[dim] = surviving(options[dim], error)
                continue
            margin = PARTS_MARGIN if {algorithm for algorithm, _ in division.runs()} == {STOCK} else MARGIN
            if seconds <= (1 - margin) * stock_seconds:
                return replace(attempt, seconds=seconds, undivided_seconds=seconds)
            # Its launches were faster when they were timed alone. From here on they count as measured together.
            correction, suspects = seconds / division.seconds, {algorithm for algorithm, _ in division.runs()}
            options[dim] = [
                replace(option, seconds=option.seconds * correction) if option.algorithm in suspects else option
                for option in options[dim]
            ]
        return stock

    def measured(self, measurement: Measurement, limit: float) -> Plan:
        """Torch's own kernel as the plan, beside it all options that were measured within the limit."""
        problem, stock_seconds = measurement.problem, measurement.stock_seconds()
        options: dict[Dim, list[Option]] = {}
        providers: Mapping[str, Provider] = {}
        if self._settings.workspace_limit > 0 and stock_seconds >= LEAST_SECONDS:
            providers = self.providers(problem)
            tasks = [(dim, name) for dim in dims(problem) for _, name in self.candidates(problem, dim)]
            workers = [self._worker(measurement, limit)]
            workers += [peer._worker(measurement.elsewhere(peer.device), limit) for peer in self._peers]
            with progress.bar(len(tasks), f"{problem.direction} {problem}", self._settings.progress) as advance:
                found = Survey(measurement, tasks, {"limit": limit, "policy": self._settings.policy})
                for (dim, _), launches in zip(tasks, found.by(workers, advance), strict=True):
                    options.setdefault(dim, []).extend(launches)
        whole = Division((Option(problem.extent, STOCK, stock_seconds, 0),))
        schedule = Schedule(problem, Dim.BATCH, whole, providers)
        return Plan(schedule, limit, options, stock_seconds, stock_seconds, stock_seconds)

    def _worker(self, measurement: Measurement, limit: float) -> Worker:
        """Measures the launches of an algorithm along a dim, on this planner's device."""
        problem = measurement.problem
        known = {(dim, name): who for dim in dims(problem) for who, name in self.candidates(problem, dim)}

        def worker(dim: Dim, name: str) -> list[Option]:
            provider = known.get((dim, name))
            return [] if provider is None else list(self._options(measurement, (provider, name), dim, limit))

        return worker

    def candidates(self, problem: ConvProblem, dim: Dim) -> list[Candidate]:
        """Who serves parts of the problem along a dim, by which algorithms."""
        part = problem if dim is Dim.BATCH else middle(problem, dim, extent(problem, dim) // 2).problem
        return [(provider, name) for provider in self._providers for name in provider.algorithms(part)]

    def _options(self, measurement: Measurement, candidate: Candidate, dim: Dim, limit: float) -> Iterator[Option]:
        """The candidate's launches at the sizes that fit and are worth measuring.

        The workspace of a launch is asked for just before it would be timed. An algorithm that is far too slow at its
        first sizes is given up, and the workspaces of its other sizes are then never asked for.
        """
        whole = extent(measurement.problem, dim)
        sizes = Sizes(
            measurement, candidate, dim, min(limit, device_of(self.device).memory // 2), self._settings.policy
        )
        if sizes.smallest is None:
            return
        hopeless = HOPELESS * measurement.stock_seconds() / whole
        probe = sizes.largest(lambda size: size * hopeless <= HOPELESS * PROBE_SECONDS) or sizes.smallest
        probes = dict.fromkeys((probe, sizes.smallest) if dim is Dim.BATCH else (probe,))
        # Smaller tiles overlap more and so take longer in all: once a size is too slow, no smaller one is timed.
        rest = sizes.all if dim is Dim.BATCH else sizes.all[::-1]
        promising = False
        for size in (*probes, *(size for size in rest if size not in probes)):
            if size not in probes and not promising:
                return
            if not sizes.fits(size):
                continue
            option = measurement.option(candidate, dim, size, hopeless * size)
            if option is not None:
                is_promising = option.seconds <= hopeless * size
                promising = is_promising or (promising and dim is Dim.BATCH)
                yield option


class Sizes:
    """The sizes of parts that a policy tries.

    Attributes:
        all: ascending, whether they fit or not.
        smallest: of those that fit, among the powers of two and the whole; `None` where none does.
    """

    def __init__(self, measurement: Measurement, candidate: Candidate, dim: Dim, allowed: float, policy: str) -> None:
        self._measurement, self._candidate, self._dim, self._allowed = measurement, candidate, dim, allowed
        whole = extent(measurement.problem, dim)
        sizes = set(micro_batch_sizes(policy, whole))
        if candidate[1] == STOCK or dim is not Dim.BATCH:
            sizes.discard(whole)
        self._few = sorted(sizes.intersection(micro_batch_sizes("powerOfTwo", whole)))
        self.smallest = next(filter(self.fits, self._few), None)
        if dim is not Dim.BATCH and self.smallest is not None:
            # Tiles overlap, so what fits is used to the full: in as few tiles as possible, of equal size.
            most = self.largest(lambda size: True) or self.smallest
            largest = bisect_left(range(whole), True, lo=most + 1, key=lambda size: not self.fits(size)) - 1
            even = -(-whole // -(-whole // largest))
            if self.fits(even):
                sizes.add(even)
                self._few = sorted({*self._few, even})
        self.all = sorted(sizes)

    def fitting(self, sizes: Iterable[int]) -> dict[int, int]:
        """The bytes that parts need of those sizes that are served within what is allowed."""
        needs = {size: self._measurement.workspace(self._candidate, self._dim, size) for size in sizes}
        return {size: need for size, need in needs.items() if need is not None and need <= self._allowed}

    def fits(self, size: int) -> bool:
        """Whether parts of a size are served within what is allowed."""
        workspace = self._measurement.workspace(self._candidate, self._dim, size)
        return workspace is not None and workspace <= self._allowed

    def largest(self, is_wanted: Callable[[int], bool]) -> int | None:
        """The largest that is wanted and fits, among the powers of two, the whole and, along space, the even tiles."""
        return next((size for size in reversed(self._few) if is_wanted(size) and self.fits(size)), None)


def _enlarged(options: Sequence[Option], division: Division, workspaces: Iterable[int]) -> Sequence[Option]:
    """The options with no less workspace than launches of the division turn out to need."""
    needed: dict[tuple[str, int], int] = {}
    for option, workspace in zip(division.options, workspaces, strict=True):
        key = option.algorithm, option.extent
        needed[key] = max(workspace, needed.get(key, 0))
    return [
        replace(option, workspace=max(option.workspace, needed.get((option.algorithm, option.extent), 0)))
        for option in options
    ]
