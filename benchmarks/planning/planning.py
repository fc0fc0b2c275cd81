"""The first steps of training under live planning, beside plain torch and measuring ahead.

    python benchmarks/planning/planning.py                                     # all networks and arms, 40 minutes
    python benchmarks/planning/planning.py --networks resnet18 shapes --rounds 3
    python benchmarks/planning/planning.py --networks slices --arms live --steps 50
    python benchmarks/planning/planning.py --networks resnet18 --arms ahead --steps 10 --policy all
    python benchmarks/planning/planning.py --device cuda:0 --save              # as planning-cuda

Every arm is a process of its own with a new database; with several rounds the arms take turns, and every figure is the
median of the rounds. Seconds of the first steps are sums from the first call on, which pays for whatever is measured or
tried. Settled is the median of the last tenth of the steps; "again" is the median in a second process that finds the
database of the first. Planning is what all steps took more than as many settled ones, in settled steps of stock.
Changing shapes: every step has images of another size.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from tqdm import tqdm

import mucudnn
from benchmarks.table import Table, conditions, save, show
from mucudnn.networks.models import NETWORKS

ARMS = "live", "ahead"
"""What is measured beside stock."""
MARKS = 1, 10, 50, 200
SIZES = 200
"""Different sizes among the changing shapes."""


def slices() -> tuple[nn.Module, Iterator[Tensor]]:
    """The network of benchmarks/demo/brain_slices.py with made-up slices."""
    width, kernel = 12, 31

    def block(inputs: int, side: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, width, side, padding=side // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())

    layers = [block(1, 3), block(width, 3), block(width, kernel), block(width, kernel), block(width, 3)]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 1)), same(torch.randn(8, 1, 64, 64))


def shapes() -> tuple[nn.Module, Iterator[Tensor]]:
    """Seven layers of 3x3, and images of `SIZES` sizes."""
    channels = 3, *[24] * 7
    pairs = itertools.pairwise(channels)
    layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(4, 3, 24 + step % SIZES // 8, 24 + step % 8) for step in range(10**6))


def network(name: str, batch: int) -> Callable[[], tuple[nn.Module, Iterator[Tensor]]]:
    def made() -> tuple[nn.Module, Iterator[Tensor]]:
        found = NETWORKS[name]
        return found.build(), same(torch.randn(batch, *found.input_shape))

    return made


def same(x: Tensor) -> Iterator[Tensor]:
    while True:
        yield x


@dataclass(frozen=True)
class Program:
    """What is trained: makes the model and its images, for as many steps and rounds as its slowness allows."""

    make: Callable[[], tuple[nn.Module, Iterator[Tensor]]]
    steps: int
    rounds: int = 1


PROGRAMS = {
    "slices": Program(slices, 200),
    "resnet18": Program(network("resnet18", 8), 200),
    "resnet50": Program(network("resnet50", 4), 200),
    "vgg16": Program(network("vgg16", 2), 50),
    "unet3d": Program(network("unet3d", 1), 20),
    "shapes": Program(shapes, 200, rounds=9),
}


def train(program: str, arm: str, steps: int, database: str, policy: str, device: torch.device) -> dict[str, Any]:
    """Seconds of every step, and what was tried."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS[program].make()
    model.to(device)
    seconds = []
    patched = contextlib.nullcontext()
    if arm != "stock":
        patched = mucudnn.patched(planning=arm, database=database, policy=policy, progress="off")  # type: ignore[assignment]
    with patched as session:
        gc.collect()  # what importing torch left to collect is no step's
        for _ in range(steps):
            x = next(inputs).to(device)
            start = time.perf_counter()
            model.zero_grad()
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            y.square().mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        records: list[Any] = [] if session is None else session.records()
    trials, cost = sum(record.trials for record in records), sum(record.cost for record in records)
    return {"seconds": seconds, "trials": trials, "cost": cost}


def in_a_process(
    program: str, arm: str, steps: int, database: str, policy: str, device: torch.device
) -> dict[str, Any]:
    """What `train` tells, in a process of its own."""
    words = [sys.executable, __file__, "--child", program, arm, str(steps), database, policy, str(device)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(program: str, arm: str, steps: int, policy: str, device: torch.device) -> dict[str, Any]:
    """An arm in processes of its own: the steps, and, but for stock, a tenth of them again."""
    with tempfile.TemporaryDirectory() as folder:
        database = os.path.join(folder, "times.sqlite")
        found = in_a_process(program, arm, steps, database, policy, device)
        found["settled"] = settled(found["seconds"])
        if arm != "stock" and program != "shapes":
            again = in_a_process(program, arm, max(10, steps // 10), database, policy, device)
            found["again"] = settled(again["seconds"])
    return found


def name_of(device: torch.device) -> str:
    """Of a GPU; a processor's does not tell more than its cores."""
    return f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""


def settled(seconds: list[float]) -> float:
    return statistics.median(seconds[-max(5, len(seconds) // 10) :])


def table(program: str, figures: dict[str, list[dict[str, Any]]]) -> Table:
    stock = figures["stock"]
    marks = [mark for mark in MARKS if mark <= len(stock[0]["seconds"])]
    settled_stock = median(stock, itemgetter("settled"))

    def told(found: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float], over: float) -> str:
        seconds = median(found, figure)
        return f"{seconds:.3f} ({seconds / over:.2f})"

    rows = []
    for arm, found in figures.items():
        sums = [partial(first_steps, mark) for mark in marks]
        cells = [arm, *(told(found, figure, median(stock, figure)) for figure in sums)]
        for name in ("settled", "again"):
            cells.append(told(found, itemgetter(name), settled_stock) if name in found[0] else "-")
        cells.append("-" if program == "shapes" else f"{median(found, planning) / settled_stock:.1f}")
        rows.append((*cells, f"{median(found, itemgetter('trials')):.0f}", f"{median(found, itemgetter('cost')):.3f}"))
    heads = [f"{mark} steps" if mark > 1 else "1 step" for mark in marks]
    heads += ["settled", "again", "planning", "trials", "their cost"]
    return Table(f"{program}: seconds (over stock)", ("", *heads), rows)


def median(rounds: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(figure(found) for found in rounds)


def first_steps(count: int, found: dict[str, Any]) -> float:
    """Seconds of the first `count` steps."""
    return sum(found["seconds"][:count])


def planning(found: dict[str, Any]) -> float:
    """Seconds that all steps took more than as many settled ones."""
    seconds: float = sum(found["seconds"]) - len(found["seconds"]) * found["settled"]
    return seconds


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        program, arm, steps, database, policy, device = sys.argv[2:]
        print(json.dumps(train(program, arm, int(steps), database, policy, torch.device(device))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside stock (default: both)")
    parser.add_argument("--steps", type=int, help="of each arm (default: 20 to 200, fewer of what is slow)")
    parser.add_argument("--rounds", type=int, help="of all arms in turn (default: 1, 9 of changing shapes)")
    parser.add_argument("--policy", default="powerOfTwo", help="sizes of parts (default %(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="default: %(default)s")
    parser.add_argument("--save", action="store_true", help="keep the figures as benchmarks/results/planning-DEVICE")
    chosen = parser.parse_args()
    figures: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rounds = {program: chosen.rounds or PROGRAMS[program].rounds for program in chosen.networks}
    turns = [(p, arm) for p in chosen.networks for _ in range(rounds[p]) for arm in ("stock", *chosen.arms)]
    for program, arm in tqdm(turns, unit="run"):
        found = run(program, arm, chosen.steps or PROGRAMS[program].steps, chosen.policy, chosen.device)
        figures.setdefault(program, {}).setdefault(arm, []).append(found)
    tables = [table(program, found) for program, found in figures.items()]
    if chosen.save:
        what, where = (__doc__ or "").split("\n\n")[2], f"{name_of(chosen.device)}{conditions()}"
        about = f"{what}\n\nRounds: {', '.join(f'{count} of {program}' for program, count in rounds.items())}. {where}"
        save(
            f"planning-{chosen.device.type}", "The first steps of training under live planning", about, tables, figures
        )
    show(tables)


if __name__ == "__main__":
    main()
