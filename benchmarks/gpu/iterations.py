"""Measures training steps of a network, a process for each arm, in turn.

The arms: torch as it is, torch capped, mucudnn within a limit, and mucudnn within what memory a step leaves.
"""

from __future__ import annotations

import statistics
import time
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


def measure(unit: IterationUnit, device: torch.device, database: Path, seconds: float) -> dict[str, Any]:
    """A row of results.

    Args:
        seconds: that the turns take, about; warming up comes before.

    Raises:
        Failed: where stock torch fails.
    """
    limits: dict[str, int | str | None] = {"stock": None, "capped": None, "mucudnn": unit.limit, "by step": "peak"}
    arms: dict[str, Process] = {}
    failed: dict[str, str] = {}
    first: dict[str, list[float]] = {}
    with ExitStack() as processes:
        for name, limit in limits.items():
            cap = unit.limit if name == "capped" else None
            process = processes.enter_context(worker(f"{unit.network}, {name}", device, cap))
            request = {"network": unit.network, "precision": unit.precision, "limit": limit, "database": str(database)}
            try:
                first[name] = _asked(process, do="prepare", **request)["first"]
                arms[name] = process
            except Failed as error:
                if name == "stock":
                    raise
                failed[name] = str(error)
        times: dict[str, list[float]] = {name: [] for name in arms}
        peaks: dict[str, int | None] = {}
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > seconds:
                break
            for name, process in arms.items():
                answer = _asked(process, do="steps", count=STEPS)
                times[name] += answer["seconds"]
                peaks[name] = answer["peak"] if answer["peak"] is None else max(answer["peak"], peaks.get(name) or 0)
    over = {
        name: ratio(times[name], times["mucudnn"]) for name in ("stock", "capped") if {name, "mucudnn"} <= times.keys()
    }
    if "by step" in times:
        over["stock by step"] = ratio(times["stock"], times["by step"])
    measuring, planning = first.get("mucudnn") or (None, None)
    return {
        "unit": {"network": unit.network, "precision": unit.precision, "limit": unit.limit},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "peaks": peaks,
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
