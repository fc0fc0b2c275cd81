"""Measures one layer in one direction: stock torch, capped stock torch, and the plans within every limit."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import LayerUnit
from benchmarks.gpu.plans import Plans, described
from benchmarks.gpu.timing import Arm, Clock, Here, in_turn, peak, ratio
from benchmarks.process import Failed, Process
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.optimizer import Division
from mucudnn.planning.planner import Planner
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import LaunchError, Schedule
from mucudnn.timing.store import Store

MIB = 2**20
WORKER = Path(__file__).with_name("worker.py")

PATCHED_LIMIT = 64 * MIB
"""Of the arm that calls torch as a user of `mucudnn.patch` does."""


def worker(name: str, device: torch.device, cap: int | None = None) -> Process:
    """A process that measures stock torch, capped in bytes where asked: cuDNN reads its cap when it is loaded."""
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if cap is not None:
        environment["CUDNN_CONV_WSCAP_DBG"] = str(cap // MIB)
    return Process(name, [[sys.executable, str(WORKER), str(device)]], **environment)


class CappedArm:
    """One layer in a capped process.

    Attributes:
        peak: bytes that a call takes at its peak, None on the host.
        failed: why it takes no further turns; None while it does.
    """

    def __init__(self, process: Process, drop: Callable[[], None]) -> None:
        self.peak: int | None = None
        self.failed: str | None = None
        self._process, self._drop = process, drop

    def ask(self, **request: Any) -> Any:
        """
        Raises:
            Failed: where the process gives no answer, or one that says so.
        """
        try:
            answer = self._process.ask(**request)
        except Failed:
            self._drop()
            raise
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def seconds(self, clock: Clock) -> float:
        """Of one call, by the process's own clock; infinite once it has failed."""
        if self.failed is None:
            try:
                found: float = self.ask(do="call")["seconds"]
                return found
            except Failed as error:
                self.failed = str(error)
        return math.inf


class Capped:
    """Stock torch under caps, a process each, started when first asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processes: dict[int, Process] = {}

    def arm(self, unit: LayerUnit, limit: int) -> CappedArm:
        """A layer under a cap in bytes, to take its turn among other arms.

        Raises:
            Failed: where the process fails; the next question starts another one.
        """
        if limit not in self._processes:
            self._processes[limit] = worker(f"torch capped at {limit // MIB} MiB", self._device, limit)
        arm = CappedArm(self._processes[limit], lambda: self._drop(limit))
        request = {"layer": asdict(unit.layer), "precision": unit.precision, "direction": unit.direction}
        arm.peak = arm.ask(do="layer", **request)["peak"]
        return arm

    def forget(self) -> None:
        """Has the processes give the memory of their layers back; they stay."""
        for limit, process in list(self._processes.items()):
            try:
                process.ask(do="forget")
            except Failed:
                self._drop(limit)

    def _drop(self, limit: int) -> None:
        process = self._processes.pop(limit, None)
        if process is not None:
            process.kill()
            process.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()


def through_torch(problem: ConvProblem, operands: Operands) -> Callable[[], object]:
    """The call that a program makes of torch for the problem."""
    zeros = (0,) * problem.dims
    geometry = (problem.stride, problem.padding, problem.dilation, problem.transposed, zeros, problem.groups)
    if problem.direction is Direction.FORWARD:
        return lambda: torch.ops.aten.convolution(operands.x, operands.w, None, *geometry)
    mask = [problem.direction is Direction.BACKWARD_DATA, problem.direction is Direction.BACKWARD_FILTER, False]
    return lambda: torch.ops.aten.convolution_backward(operands.y, operands.x, operands.w, None, *geometry, mask)


@contextmanager
def installed(session: Session) -> Iterator[None]:
    shim.install(session)
    try:
        yield
    finally:
        shim.install(None)


def measure(
    unit: LayerUnit,
    limits: Iterable[int],
    device: torch.device,
    clock: Clock,
    database: Path,
    capped: Capped | None,
    seconds: float,
) -> dict[str, Any]:
    """A row of results.

    Args:
        limits: in bytes.
        capped: processes of torch capped at the limits; None: without these arms.
        seconds: that the timing of the arms in turn takes, about; measuring the launches comes before.
    """
    problem, database_path = unit.problem(), str(database)
    operands = synthetic_operands(problem, device)
    store = Store(database_path)
    settings = Settings.from_environment(
        {}, workspace_limit="unlimited", policy=unit.policy, database=database_path, progress="off"
    )
    planner = Planner(settings, store, device=device)
    took = []
    for _ in range(2):  # the second time every launch is known
        began = time.perf_counter()
        plan = planner.plan(planner.measurement(problem, operands), math.inf)
        took.append(time.perf_counter() - began)
    plans = Plans.of(plan.options.get(Dim.BATCH, ()), problem.extent)
    chosen = {limit: plans.within(limit) for limit in limits}

    call = through_torch(problem, operands)
    patched = Session(
        Settings.from_environment(
            {}, workspace_limit=PATCHED_LIMIT, policy=unit.policy, database=database_path, progress="off"
        )
    )
    arms: dict[str, Arm] = {"stock": Here(call), "patched": Here(call, lambda: installed(patched))}
    about: dict[str, dict[str, Any]] = {}
    for division in dict.fromkeys(division for pair in chosen.values() for division in pair if division is not None):
        text = described(division)
        about[text["division"]], work = _tried(problem, division, operands, planner, call)
        about[text["division"]] |= text
        if work is not None:
            arms[text["division"]] = Here(work)
    caps: dict[int, CappedArm] = {}
    failures: dict[int, str] = {}
    for limit in chosen if capped is not None else ():
        try:
            arms[_cap(limit)] = caps[limit] = capped.arm(unit, limit)
        except Failed as error:
            failures[limit] = str(error)
    times = in_turn(arms, clock, seconds)
    peaks = {name: peak(arm, device) for name, arm in arms.items() if isinstance(arm, Here)}
    if capped is not None:
        capped.forget()
    for name in about.keys() & times.keys():
        about[name] |= {"seconds": statistics.median(times[name]), "peak": peaks[name]}
    failures |= {limit: arm.failed for limit, arm in caps.items() if arm.failed is not None}

    def entry(limit: int) -> dict[str, Any]:
        undivided, divided = (None if d is None else about[described(d)["division"]] for d in chosen[limit])
        reason = failures.get(limit)
        cap = statistics.median(times[_cap(limit)]) if limit in caps and reason is None else None
        over: dict[str, float | None] = {"undivided": None, "stock": None, "capped": None}
        if divided is not None and "seconds" in divided:
            over["stock"] = ratio(times["stock"], times[divided["division"]])
            over["capped"] = None if cap is None else ratio(times[_cap(limit)], times[divided["division"]])
            if undivided is not None and "seconds" in undivided:
                over["undivided"] = ratio(times[undivided["division"]], times[divided["division"]])
        found = {"undivided": undivided, "divided": divided, "capped": cap, "over": over}
        found["capped_peak"] = None if cap is None else caps[limit].peak
        return found if reason is None else {**found, "capped_failed": reason}

    (record,) = patched.records() or (None,)
    row = {
        "unit": {
            "group": unit.group,
            "layer": unit.layer.name,
            "precision": unit.precision,
            "direction": unit.direction,
            "policy": unit.policy,
        },
        "stock": statistics.median(times["stock"]),
        "stock_peak": peaks["stock"],
        "patched": {
            "limit": PATCHED_LIMIT,
            "seconds": statistics.median(times["patched"]),
            "over_stock": ratio(times["stock"], times["patched"]),
            "division": "stock" if record is None else record.division,
            "peak": peaks["patched"],
        },
        "limits": {str(limit): entry(limit) for limit in chosen},
        "needed": plans.needed(),
        "launches": sum(map(len, plan.options.values())),
        "benchmarking": took[0],
        "planning": took[1],
    }
    patched.close()
    store.close()
    return row


def _tried(
    problem: ConvProblem, division: Division, operands: Operands, planner: Planner, call: Callable[[], object]
) -> tuple[dict[str, Any], Callable[[], object] | None]:
    """Whether a division runs, and how far its result is from torch's own, relative to that in the 2-norm."""
    schedule = Schedule(problem, division, planner.offers.providers(problem))

    def work() -> None:
        schedule.run(operands)

    operands.target(problem).fill_(float("nan"))
    try:
        work()
    except LaunchError as error:
        return {"failed": str(error)}, None
    result: Any = call()
    expected = result if problem.direction is Direction.FORWARD else next(t for t in result if t is not None)
    off = torch.linalg.vector_norm(operands.target(problem) - expected, dtype=torch.float64)
    return {"error": (off / torch.linalg.vector_norm(expected, dtype=torch.float64)).item()}, work


def _cap(limit: int) -> str:
    """The arm's name."""
    return f"capped at {limit}"


def free(device: torch.device) -> None:
    """Gives what torch's allocator holds back to the device, for the other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def quiet_environment() -> None:
    """Settings of the caller's environment do not reach into what is measured."""
    for name in [name for name in os.environ if name.startswith("MUCUDNN_") or name == "CUDNN_CONV_WSCAP_DBG"]:
        del os.environ[name]
