"""Measures the units of benchmarks/gpu/gpu.py on one device, one after the other, as far as the time goes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu import costs, iterations, layers
from benchmarks.gpu.cases import PRECISIONS, IterationUnit, LayerUnit, Unit
from benchmarks.gpu.timing import clock_of
from benchmarks.harness import Record, Records
from mucudnn.providers import providers_on
from mucudnn.version import VERSION

UNIT_SECONDS = 1.5
"""Seconds that the arms of a layer take turns; a network's take ten times as long."""


class NoDevice(RuntimeError):
    """There is nothing to measure on; the message is one line."""


class OutOfTime(Exception):
    """A unit takes longer than is left of the run. No RuntimeError, which would be taken for an algorithm's failure."""


class DeviceLost(RuntimeError):
    """An error after which this process cannot use the device any more; the message is one line."""


def about(device: torch.device) -> dict[str, str]:
    """Where and with what is measured.

    Raises:
        NoDevice: where the device is not there, or not to be used.
    """
    versions = {"torch": torch.__version__, "cuDNN": str(torch.backends.cudnn.version()), "mucudnn": VERSION}
    if device.type == "cpu":
        return {"device": "cpu", **versions}
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        there = f"there are {count} CUDA devices" if torch.cuda.is_available() else "torch finds no CUDA device"
        raise NoDevice(f"{there}, {device} is to be measured on (--device cpu tries the script itself)")
    try:
        providers_on(device)
    except RuntimeError as error:
        raise NoDevice(str(error)) from error
    return {"device": torch.cuda.get_device_name(device), **versions}


class Bench:
    """Measures units on one device."""

    def __init__(self, device: torch.device, results: Records, limits: list[int], database: Path) -> None:
        self._device, self._results, self._limits, self._database = device, results, limits, database
        self._capped = layers.Capped(device)
        self._clock = clock_of(device)

    def measure(self, unit: Unit) -> Record:
        """The unit's row; one that says what failed, where it does.

        Raises:
            DeviceLost: where nothing more can be measured in this process.
        """
        try:
            return self._row(unit)
        except RuntimeError as error:  # out of memory among them
            reason = (str(error) or repr(error)).splitlines()[0]
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(reason) from error
        return {"failed": reason}

    def _row(self, unit: Unit) -> Record:
        layers.free(self._device)
        if isinstance(unit, LayerUnit):
            PRECISIONS[unit.precision].apply()
            limits = self._missing(unit)
            return layers.measure(unit, limits, self._device, self._clock, self._database, self._capped, UNIT_SECONDS)
        if isinstance(unit, IterationUnit):
            self._capped.close()  # what those processes hold would be missing to the networks'
            return iterations.measure(unit, self._device, self._database, 10 * UNIT_SECONDS)
        return costs.measure(self._device)

    def _missing(self, unit: LayerUnit) -> list[int]:
        there = self._results.found.get(unit.key, {}).get("limits", {})
        return [limit for limit in self._limits if str(limit) not in there] or self._limits

    def close(self) -> None:
        self._capped.close()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """
    Raises:
        OutOfTime: in the middle of what is done when the time is over.
    """

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_done(results: Records, unit: Unit, limits: Iterable[int], retry: bool) -> bool:
    """Whether a unit is measured, for every limit in bytes; a failed one counts unless it is to be tried again."""
    row = results.found.get(unit.key)
    if row is None or "failed" in row:
        return row is not None and not retry
    return "limits" not in row or {str(limit) for limit in limits} <= row["limits"].keys()


def run(
    pending: list[Unit],
    wanted: int,
    results: Records,
    where: dict[str, str],
    seconds: float,
    measure: Callable[[Unit], Record],
) -> int:
    """Measures units one after the other until the next would end beyond `seconds`.

    One that turns out to take longer is left for another run, which finds the launches that this one has timed. Of what
    another run has measured of a unit, the limits stay that are not measured anew.

    Args:
        wanted: how many units are asked for, those that were measured before among them.
        where: what `about` says, kept in each record.

    Returns:
        How many were measured.

    Raises:
        DeviceLost: as `measure`; the unit counts as failed.
    """
    began, longest, count = time.perf_counter(), 0.0, 0
    done = wanted - len(pending)
    for unit in pending:
        start = time.perf_counter()
        left = seconds - (start - began)
        if count and longest > left:
            break
        try:
            with at_most(left):
                row = measure(unit)
        except OutOfTime:
            break
        except DeviceLost as error:
            results.add({"key": unit.key, "about": where, "failed": str(error)})
            raise
        before = results.found.get(unit.key, {}).get("limits", {})
        if "limits" in row:
            row = {**row, "limits": {**before, **row["limits"]}}
        results.add({"key": unit.key, "about": where, **row})
        took = time.perf_counter() - start
        longest = max(longest, took)
        count += 1
        failed = f": {row['failed']}" if "failed" in row else ""
        print(f"{done + count} of {wanted} units: {unit.key}, {took:.1f} s{failed}", file=sys.stderr)
    return count
