"""Measures training steps of a network: stock torch, capped stock torch and mucudnn, a process each, in turn."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import IterationUnit
from benchmarks.gpu_layers import worker
from benchmarks.gpu_timing import ratio
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
    caps: dict[str, int | None] = {"stock": None, "capped": unit.limit, "mucudnn": None}
    arms: dict[str, Process] = {}
    failed: dict[str, str] = {}
    first: list[float] = []
    with ExitStack() as processes:
        for name, cap in caps.items():
            process = processes.enter_context(worker(f"{unit.network}, {name}", device, cap))
            limit = unit.limit if name == "mucudnn" else None
            request = {"network": unit.network, "precision": unit.precision, "limit": limit, "database": str(database)}
            try:
                first = _asked(process, do="prepare", **request)["first"]  # in the end mucudnn's, if it does not fail
                arms[name] = process
            except Failed as error:
                if name == "stock":
                    raise
                first, failed[name] = [], str(error)
        times: dict[str, list[float]] = {name: [] for name in arms}
        peaks: dict[str, int | None] = {}
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > seconds:
                break
            for name, process in arms.items():
                answer = _asked(process, do="steps", count=STEPS)
                times[name] += answer["seconds"]
                peaks[name] = answer["peak"]
    over = {
        name: ratio(times[name], times["mucudnn"]) for name in ("stock", "capped") if {name, "mucudnn"} <= times.keys()
    }
    return {
        "unit": {"network": unit.network, "precision": unit.precision, "limit": unit.limit},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "peaks": peaks,
        "over": over,
        "failures": failed,
        "benchmarking": first[0] if first else None,
        "planning": first[1] if first else None,
    }


def _asked(process: Process, **request: Any) -> Any:
    answer = process.ask(**request)
    if "failed" in answer:
        raise Failed(answer["failed"])
    return answer
