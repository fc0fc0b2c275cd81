"""What live planning finds beside what measuring ahead finds: steps under both, and of plain torch, in turn.

    python benchmarks/planning/found.py                               # all networks, 30 minutes
    python benchmarks/planning/found.py --networks slices --seconds 60
    python benchmarks/planning/found.py --save                        # as planning-found-cpu

First every network is trained by `planning.py`, once planned live and once measured ahead, each in a process
of its own with a new database. Then, in one process, a step of plain torch, one under what live planning has found, and
one under what measuring ahead has found take turns, in every round in an order that is drawn, so that a change of the
machine's speed falls on all three, and so does what a long step of plain torch leaves in its caches. Seconds are
medians; a ratio is the median of those of the rounds, behind it their quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm import tqdm

import mucudnn
from benchmarks.planning.planning import ARMS, PROGRAMS, in_a_process
from benchmarks.table import Table, conditions, save, show
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session

NETWORKS = tuple(name for name in PROGRAMS if name != "shapes")
AHEAD_STEPS = 2
"""After the first, nothing is left to measure ahead."""
FIRST_STEPS = 3
"""Steps of each arm that do not count: in the first, torch's own kernels compute."""
LEAST_ROUNDS, MOST_ROUNDS = 11, 201


def turns(program: str, databases: dict[str, str], seconds: float) -> dict[str, list[float]]:
    """Seconds of a step in every round, by arm; all rounds together take about so many seconds."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS[program].make()
    x = next(inputs)

    def step(session: Session | None) -> float:
        shim.install(session)
        start = time.perf_counter()
        model.zero_grad()
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        return time.perf_counter() - start

    with contextlib.ExitStack() as stack:
        arms: dict[str, Session | None] = {"stock": None}
        for arm, database in databases.items():
            arms[arm] = stack.enter_context(mucudnn.patched(planning=arm, database=database, progress="off"))
        first = [[step(session) for session in arms.values()] for _ in range(FIRST_STEPS)]
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, round(seconds / sum(first[-1]))))
        gc.collect()
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        draw = random.Random(0)
        for _ in range(rounds):
            for arm in draw.sample(list(arms), len(arms)):
                found[arm].append(step(arms[arm]))
    return found


def compared(program: str, seconds: float) -> dict[str, list[float]]:
    """As `turns`, with new databases."""
    with tempfile.TemporaryDirectory() as folder:
        databases = {arm: f"{folder}/{arm}.sqlite" for arm in ARMS}
        for arm, database in databases.items():
            steps = AHEAD_STEPS if arm == "ahead" else PROGRAMS[program].steps
            in_a_process(program, arm, steps, database, "powerOfTwo", torch.device("cpu"))
        return turns(program, databases, seconds)


def row(program: str, found: dict[str, list[float]]) -> tuple[str, ...]:
    """A row of the table."""
    seconds = (f"{statistics.median(steps):.4f}" for steps in found.values())
    over_stock = (_ratio(found[arm], found["stock"]) for arm in ARMS)
    return program, f"{len(found['stock'])}", *seconds, *over_stock, _ratio(found["live"], found["ahead"])


def _ratio(steps: list[float], others: list[float]) -> str:
    ratios = [one / other for one, other in zip(steps, others, strict=True)]
    least, middle, most = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({least:.3f} to {most:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--seconds", type=float, default=240, help="of a network's steps in turn (default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures as benchmarks/results/planning-found-cpu")
    chosen = parser.parse_args()
    figures = {program: compared(program, chosen.seconds) for program in tqdm(chosen.networks, unit="network")}
    rows = [row(program, found) for program, found in figures.items()]
    headings = ("", "rounds", "stock", *ARMS, *(f"{arm} over stock" for arm in ARMS), "live over ahead")
    table = Table("seconds of a step", headings, rows)
    if chosen.save:
        about = f"{(__doc__ or '').split(chr(10) * 2)[2].strip()}\n\n{conditions()}"
        save("planning-found-cpu", "What live planning finds, and what measuring ahead finds", about, [table], figures)
    show([table])


if __name__ == "__main__":
    main()
