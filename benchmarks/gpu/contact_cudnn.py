"""Questions of the first contact about cuDNN itself: its engines, its plans, its older functions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

from benchmarks.gpu.contact import (
    MIB,
    PRECISIONS,
    Answer,
    Question,
    alexnet_conv2,
    milliseconds,
    needs_gpu,
    planner_on,
    precise,
)
from benchmarks.layers.elsewhere import H200, card_of, properties_of
from mucudnn.convolution.problem import Dim, Direction
from mucudnn.optimizer import Option
from mucudnn.providers import STOCK
from mucudnn.providers.cudnn.backend import Behavior
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import Engine, Graph
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.schedule import LaunchError

FINALIZING_SECONDS = 30.0
"""Of the question how long plans take to be finalized; engines that compile may take seconds each."""

LIMIT = 64 * MIB


def properties(device: torch.device) -> Answer:
    needs_gpu(device)
    with _card(device).planning() as here:
        assert here.handle is not None
        found = properties_of(_card(device).library, here.handle)
    name = found.get("deviceName") or torch.cuda.get_device_name(device)
    if "H200" not in str(name):
        return Answer("another card", f"{name}: {found}")
    different = {
        key: (found.get(key), H200.get(key)) for key in sorted({*found, *H200}) if found.get(key) != H200.get(key)
    }
    told = "; ".join(f"{key} {here} (written: {there})" for key, (here, there) in different.items())
    return Answer("no" if different else "yes", told or f"{len(H200)} properties")


def engines(device: torch.device) -> Answer:
    needs_gpu(device)
    card, differences, counts = _card(device), [], []
    with card.planning() as here:
        assert here.handle is not None
        away = card_of(card.library, properties_of(card.library, here.handle))
        for precision in ("float32", "float16"):
            for direction in Direction:
                put = form(alexnet_conv2(device, direction, precision))
                assert put is not None
                lists = [
                    {index: plan for index, _, plan, _ in _plans(Graph(card.library, where, put, accumulate=False))}
                    for where in (here, away)
                ]
                counts.append(len(lists[0]))
                only = [sorted(one.keys() - other.keys()) for one, other in (lists, lists[::-1])]
                other_bytes = [i for i in lists[0].keys() & lists[1].keys() if lists[0][i] != lists[1][i]]
                if any(only) or other_bytes:
                    alone = f"here only {only[0]}, away only {only[1]}"
                    differences.append(f"{precision} {direction}: {alone}, other workspace {other_bytes}")
    return Answer("no" if differences else "yes", "; ".join(differences) or f"{counts} engines that do not compile")


def finalizing(device: torch.device) -> Answer:
    needs_gpu(device)
    card = _card(device)
    seconds: dict[str, list[float]] = {}
    began = time.perf_counter()
    with card.planning() as here:
        for precision in ("float32", "float16"):
            for direction in Direction:
                put = form(alexnet_conv2(device, direction, precision))
                assert put is not None
                graph = Graph(card.library, here, put, accumulate=False)
                for _, engine, _, took in _plans(graph, compiling=True, until=began + FINALIZING_SECONDS):
                    notes = (
                        "+".join(Behavior(n).name for n in sorted(engine.behavior) if n in set(Behavior)) or "no note"
                    )
                    seconds.setdefault(notes, []).append(took)
    told = [
        f"{notes}: {len(times)} plans, median {milliseconds(statistics.median(times))}, most {milliseconds(max(times))}"
        for notes, times in sorted(seconds.items())
    ]
    compiling = [t for notes, times in seconds.items() if "RUNTIME_COMPILATION" in notes for t in times]
    slow = bool(compiling) and max(compiling) > 1
    return Answer("compiling takes seconds: leave such engines out" if slow else "none takes a second", "; ".join(told))


def older_functions(device: torch.device) -> Answer:
    needs_gpu(device)
    told, served = [], set()
    for precision in PRECISIONS:
        with precise(precision):
            for direction in Direction:
                problem = alexnet_conv2(device, direction, precision)
                found = Legacy(_card(device)).search(problem)
                for name in ("fft", "fft_tiling", "winograd_nonfused"):
                    one = found.get(f"legacy_{name}")
                    if one is not None and not one.status:
                        served.add(f"{name} ({precision})")
                        told.append(
                            f"{precision} {direction} {name} {one.milliseconds:.2f} ms {one.workspace / MIB:.0f} MiB"
                        )
                    else:
                        told.append(
                            f"{precision} {direction} {name} {'absent' if one is None else f'status {one.status}'}"
                        )
    return Answer(", ".join(sorted(served)) or "none", "; ".join(told))


def older_against_engines(device: torch.device) -> Answer:
    needs_gpu(device)
    told, wins = [], 0
    for direction in Direction:
        with precise("float32"):
            problem = alexnet_conv2(device, direction)
            planner = planner_on(device)
            measurement = planner.measurement(problem)
            timed = _timed_undivided(measurement, planner.offers.candidates(problem, Dim.BATCH))
            stock_seconds = measurement.stock_seconds()
        older, engine = (
            min((o for o in timed if o.algorithm.startswith(kind)), key=lambda option: option.seconds, default=None)
            for kind in ("legacy_", "eng")
        )
        wins += older is not None and (engine is None or older.seconds < engine.seconds)
        told.append(
            f"{direction}: "
            + ", ".join(
                f"{'-' if o is None else f'{o.algorithm} {milliseconds(o.seconds)} {o.workspace / MIB:.0f} MiB'}"
                for o in (older, engine)
            )
            + f", torch {milliseconds(stock_seconds)}"
        )
    return Answer(f"the older one is faster in {wins} of {len(Direction)}", "; ".join(told))


def _timed_undivided(measurement: Measurement, candidates: Iterable[Candidate]) -> list[Option]:
    """The algorithms that compute the whole within the limit, with their times."""
    whole, found = measurement.problem.extent, []
    for candidate in candidates:
        need = measurement.workspace(candidate, Dim.BATCH, whole) if candidate[1] != STOCK else None
        if need is not None and need <= LIMIT:
            with suppress(LaunchError):
                seconds = measurement.seconds(candidate, Dim.BATCH, whole, math.inf)
                found.append(Option(whole, candidate[1], seconds, need))
    return found


def _card(device: torch.device) -> Card:
    return Card(device.index or 0)


def _plans(
    graph: Graph, compiling: bool = False, until: float = float("inf")
) -> Iterator[tuple[int, Engine, int, float]]:
    """Of every engine that serves: its number, itself, its plan's workspace, and the seconds that took."""
    for index in range(graph.engines):
        if time.perf_counter() > until:
            return
        try:
            engine = graph.engine(index)
            if Behavior.RUNTIME_COMPILATION in engine.behavior and not compiling:
                continue  # without a device it cannot load what it compiles
            began = time.perf_counter()
            plan = graph.plan(engine)
        except CudnnError:
            continue
        yield index, engine, plan.workspace, time.perf_counter() - began


QUESTIONS = {
    "properties": Question("Are the card's properties those that were written down for an H200?", properties),
    "engines": Question("Do the engines listed without a device equal those on the card?", engines),
    "finalizing": Question("How long do plans take to be finalized, by behaviour note?", finalizing),
    "older": Question("Which of FFT, tiled FFT and non-fused Winograd of the older functions answer?", older_functions),
    "best": Question("Within 64 MiB, is the best older function faster than the best engine?", older_against_engines),
}
