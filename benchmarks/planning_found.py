"""What live planning finds beside what measuring ahead finds: steps under both, and of plain torch, in turn.

    python benchmarks/planning_found.py                               # all networks, 20 minutes
    python benchmarks/planning_found.py --networks slices --rounds 9
    python benchmarks/planning_found.py --save                        # as planning-found-cpu

First every network is trained by `benchmarks/planning.py`, once planned live and once measured ahead, each in a process
of its own with a new database. Then, in one process, a few steps of plain torch, under what live planning has found,
and under what measuring ahead has found, take turns, every other round in the opposite order, so that a change of the
machine's speed falls on all three. The first step of every turn is left out: in it torch's own kernels compute. Seconds
are medians of the turns' medians; the ratio is the median of those of the rounds, behind it their quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

import mucudnn
from benchmarks.planning import ARMS, PROGRAMS, in_a_process
from benchmarks.table import Table, conditions, save, show

NETWORKS = tuple(name for name in PROGRAMS if name != "shapes")
AHEAD_STEPS = 2
"""After the first, nothing is left to measure ahead."""
TURN_SECONDS, MOST_STEPS = 4.0, 20
"""About what the steps of a turn take, of which there is at least one beside the first, and how many there may be."""


def turns(program: str, databases: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in every round, by arm."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS[program].make()
    x = next(inputs)
    found: dict[str, list[float]] = {arm: [] for arm in ("stock", *databases)}
    steps = dict.fromkeys(found, 1)
    for place in range(rounds + 1):
        for arm, medians in list(found.items())[:: -1 if place % 2 else 1]:
            patched: Any = contextlib.nullcontext()
            if arm != "stock":
                patched = mucudnn.patched(planning=arm, database=databases[arm], progress="off")
            gc.collect()
            with patched:
                seconds = []
                for _ in range(1 + steps[arm]):
                    start = time.perf_counter()
                    model.zero_grad()
                    y = model(x)
                    (y[0] if isinstance(y, tuple) else y).square().mean().backward()
                    seconds.append(time.perf_counter() - start)
            medians.append(statistics.median(seconds[1:]))
            if place == 0:  # the round that readies the process tells how many steps there is time for
                steps[arm] = max(1, min(MOST_STEPS, round(TURN_SECONDS / medians.pop())))
    return found


def compared(program: str, rounds: int) -> dict[str, list[float]]:
    """As `turns`, with new databases."""
    with tempfile.TemporaryDirectory() as folder:
        databases = {arm: f"{folder}/{arm}.sqlite" for arm in ARMS}
        for arm, database in databases.items():
            steps = AHEAD_STEPS if arm == "ahead" else PROGRAMS[program].steps
            in_a_process(program, arm, steps, database, "powerOfTwo", torch.device("cpu"))
        return turns(program, databases, rounds)


def row(program: str, found: dict[str, list[float]]) -> tuple[str, ...]:
    ratios = [live / ahead for live, ahead in zip(found["live"], found["ahead"], strict=True)]
    least, middle, most = statistics.quantiles(ratios, n=4, method="inclusive")
    seconds = (f"{statistics.median(medians):.4f}" for medians in found.values())
    return program, *seconds, f"{middle:.3f} ({least:.3f} to {most:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of all arms in turn (default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures as benchmarks/results/planning-found-cpu")
    chosen = parser.parse_args()
    figures = {program: compared(program, chosen.rounds) for program in tqdm(chosen.networks, unit="network")}
    rows = [row(program, found) for program, found in figures.items()]
    table = Table("seconds of a step", ("", "stock", *ARMS, "live over ahead"), rows)
    if chosen.save:
        about = f"{(__doc__ or '').split(chr(10) * 2)[2]}\n\nRounds: {chosen.rounds}. {conditions()}"
        save("planning-found-cpu", "What live planning finds, and what measuring ahead finds", about, figures, [table])
    show([table])


if __name__ == "__main__":
    main()
