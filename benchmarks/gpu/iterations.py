"""Measures training steps of a network, a process for each arm, in turn.

The arms: torch with its search for the fastest kernels ("stock"), torch capped, mucudnn within a limit, and mucudnn
within what memory a step leaves; where asked for, torch without that search ("torch"), and torch in channels_last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import IterationUnit
from benchmarks.gpu.layers import worker
from benchmarks.gpu.timing import ratio
from benchmarks.process import Failed, Process

STEPS = 3
"""Steps of one arm before the next one has its turn."""

LEAST_TURNS, MOST_TURNS = 3, 15


ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "capped": {},
    "mucudnn": {},
    "by step": {"limit": "peak"},
    "torch": {"benchmark": False},
    "channels_last": {"channels_last": True},
}
"""What each asks of its process beside the network; "mucudnn" and "capped" have the unit's limit."""


def measure(
    unit: IterationUnit, device: torch.device, database: Path, seconds: float, names: Sequence[str] = tuple(ARMS)[:4]
) -> dict[str, Any]:
    """A row of results.

    Args:
        seconds: that the turns take, about; warming up comes before.
        names: of the arms, "stock" among them.

    Raises:
        Failed: where stock torch fails.
    """
    arms: dict[str, Process] = {}
    failed: dict[str, str] = {}
    first: dict[str, list[float]] = {}
    with ExitStack() as processes:
        started = {
            name: processes.enter_context(
                worker(f"{unit.network}, {name}", device, unit.limit if name == "capped" else None)
            )
            for name in names
        }
        for name, process in started.items():
            request = {"limit": unit.limit if name == "mucudnn" else None, **ARMS[name]}
            request |= {"network": unit.network, "precision": unit.precision, "database": str(database)}
            try:
                first[name] = _asked(process, do="prepare", **request)["first"]
                arms[name] = process
            except Failed as error:
                if name == "stock":
                    raise
                failed[name] = str(error)
        times: dict[str, list[float]] = {name: [] for name in arms}
        peaks: dict[str, int | None] = {}
        outside: dict[str, int | None] = {}
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > seconds:
                break
            for name, process in arms.items():
                answer = _asked(process, do="steps", count=STEPS)
                times[name] += answer["seconds"]
                peaks[name] = answer["peak"] if answer["peak"] is None else max(answer["peak"], peaks.get(name) or 0)
                outside[name] = answer["outside"]
    over = {
        name: ratio(times[name], times["mucudnn"])
        for name in times
        if "mucudnn" in times and name not in ("mucudnn", "by step")
    }
    if "by step" in times:
        over["stock by step"] = ratio(times["stock"], times["by step"])
    measuring, planning = first.get("mucudnn") or (None, None)
    return {
        "unit": {"network": unit.network, "precision": unit.precision, "limit": unit.limit},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "peaks": peaks,
        "outside": outside,
        "over": over,
        "failures": failed,
        "benchmarking": measuring,
        "planning": planning,
    }


def _asked(process: Process, **request: Any) -> Any:
    answer = process.ask(**request)
    if "failed" in answer:
        raise Failed(answer["failed"])
    return answer
