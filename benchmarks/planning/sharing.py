"""Three ways to give a network's convolutions workspace, and how fast the decisions are made.

    python benchmarks/planning/sharing.py    # measures a network of large kernels, a few minutes
    python benchmarks/planning/sharing.py --network resnet50 --batch 64 --database gpu-times.sqlite --machine H200

Of one total, each kernel (a layer in a direction) gets an equal part for itself ("equal": WR at total / kernels), or
the share that makes the network fastest ("WD"), or all of it, one after the other ("reused": WR in one arena, which a
program on a single stream can have). The first table goes by the times on record; the second times training steps
of a program under each setting, in turn, and shows medians; the third times the solvers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planning.solvers import Solved, solved
from benchmarks.table import Table, conditions, save, show
from mucudnn.networks import layers
from mucudnn.networks.layers import LayerCall
from mucudnn.networks.plan import plan
from mucudnn.planning.on_record import RecordedTimes, times
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings
from mucudnn.sizes import format_bytes
from mucudnn.timing.store import Store

FRACTIONS = (1 / 16, 1 / 4, 1)
"""Totals, in units of what all kernels' fastest divisions take together."""

WAYS = ("equal", "WD", "reused")
RESULT = "sharing-cpu"
ROUNDS = 5
LARGE = (8, 1, 48, 48)
"""The mini-batch of the network of large kernels."""


class LargeKernel(nn.Module):
    """A dense convolution with a large kernel on a residual path, as the stages of RepLKNet (arXiv:2203.06717)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.convolution(x)))


def large_kernels() -> nn.Sequential:
    """Three stages at falling resolution, kernels of 31, 23 and 13; from (N, 1, H, W) to two scores."""
    layers: list[nn.Module] = []
    width = 8
    for inputs, kernel in ((1, 31), (width, 23), (2 * width, 13)):
        outputs = width if inputs == 1 else 2 * inputs
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [LargeKernel(outputs, kernel), LargeKernel(outputs, kernel), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 2))


@dataclass(frozen=True)
class Planned:
    """A network at one total: seconds of all convolutions in one step, by the times on record."""

    network: str
    kernels: int
    total: int
    stock: float
    equal: float
    wd: float
    reused: float
    solved_in: float
    gap: float


@dataclass(frozen=True)
class Trained:
    """A network at one total: median seconds of a training step, and medians over rounds of stock's time over them."""

    network: str
    total: int
    seconds: dict[str, float]
    speedups: dict[str, float]
    wd_over_equal: float
    wd_over_reused: float
    workspace: int


def settings(**given: Any) -> Settings:
    return Settings.from_environment({}, planning="ahead", **given)


def totals(layers: list[LayerCall], known: RecordedTimes) -> list[int]:
    """The totals that are tried."""
    free = plan(layers, known, settings(total_workspace_size="unlimited"))
    return [int(free.workspace * fraction) for fraction in FRACTIONS] if free.workspace else []


def planned(network: str, layers: list[LayerCall], known: RecordedTimes) -> Iterator[Planned]:
    """The three ways at each total, by the times on record."""
    kernels = sum(layer.count for layer in layers if known.knows(layer.problem))
    for total in totals(layers, known):
        began = time.perf_counter()
        wd = plan(layers, known, settings(total_workspace_size=total))
        seconds = time.perf_counter() - began
        equal = plan(layers, known, settings(workspace_limit=total // kernels))
        reused = plan(layers, known, settings(workspace_limit=total))
        assert wd.sharing is not None
        gap = wd.sharing.gap
        yield Planned(
            network, kernels, total, wd.stock_seconds, equal.seconds, wd.seconds, reused.seconds, seconds, gap
        )


def trained(network: str, build: Callable[[], nn.Module], shape: tuple[int, ...], total: int, kernels: int,
            database: str) -> Trained:  # fmt: skip
    """Training steps under each way, in turn."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, labels = torch.randn(shape), torch.zeros(shape[0], dtype=torch.long)
    arms: dict[str, Session | None] = {
        "stock": None,
        "equal": Session(settings(workspace_limit=total // kernels, database=database)),
        "wd": Session(settings(total_workspace_size=total, database=database)),
        "reused": Session(settings(workspace_limit=total, database=database)),
    }

    def step(name: str) -> float:
        shim.install(arms[name])
        began = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        seconds = time.perf_counter() - began
        shim.install(None)
        return seconds

    for _ in range(4):  # measures, divides the total, confirms what was chosen, warms up
        for name in arms:
            step(name)
    order, rounds = list(arms), []
    for _ in range(ROUNDS):
        order = [*order[1:], order[0]]
        rounds.append({name: step(name) for name in order})
    session = arms["wd"]
    assert session is not None
    workspace = sum(record.workspace for record in session.records())
    for session in arms.values():
        if session is not None:
            session.close()

    def median(one: str, other: str) -> float:
        return statistics.median(r[one] / r[other] for r in rounds)

    return Trained(
        network,
        total,
        {name: statistics.median(r[name] for r in rounds) for name in arms},
        {name: median("stock", name) for name in arms},
        median("equal", "wd"),
        median("reused", "wd"),
        workspace,
    )


def tables(plans: list[Planned], runs: list[Trained], solves: list[Solved]) -> Iterator[Table]:
    """The results for people."""
    if plans:
        cells = []
        for row in plans:
            numbers = (f"{1e3 * seconds:.2f}" for seconds in (row.stock, row.equal, row.wd, row.reused))
            ratios = (f"{row.equal / row.wd:.3f}", f"{row.reused / row.wd:.3f}")
            total = format_bytes(row.total)
            cells.append((row.network, str(row.kernels), total, *numbers, *ratios, f"{row.solved_in:.3f} s"))
        headings = "network", "kernels", "total", "stock", *WAYS, "WD over equal", "WD over reused", "planned in"
        yield Table("all convolutions of a step by the times on record, ms", headings, cells)
    if runs:
        cells = []
        for run in runs:
            numbers = (f"{1e3 * run.seconds[arm]:.1f} ({run.speedups[arm]:.2f}x)" for arm in run.seconds)
            ratios = (f"{run.wd_over_equal:.3f}", f"{run.wd_over_reused:.3f}")
            cells.append((run.network, format_bytes(run.total), format_bytes(run.workspace), *numbers, *ratios))
        title = f"training steps, {torch.get_num_threads()} threads: ms, and times as fast as stock"
        yield Table(title, ("network", "total", "WD holds", "stock", *WAYS, "WD over equal", "WD over reused"), cells)
    cells = [(solve.decision, f"{solve.seconds:.3f}", f"{solve.target:g}", f"{solve.gap:.1e}") for solve in solves]
    yield Table("decisions", ("decision", "seconds", "target", "gap"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", default=[], help="one whose times are on record; repeatable")
    parser.add_argument("--batch", type=int, help="its samples")
    parser.add_argument("--database", help="times on record, of this or another machine")
    parser.add_argument("--machine", default="", help="take the times whose environment contains this text")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    options = parser.parse_args()
    before = conditions()

    plans: list[Planned] = []
    runs: list[Trained] = []
    if options.network:
        if options.database is None:
            parser.error("--network goes by times on record: give --database")
        for name in options.network:
            network = layers.find(name)
            if network.input_shape is None:
                parser.error(f"{name} does not tell its input")
            convolutions = layers.convolutional(
                network.build, (options.batch or network.batch or 32, *network.input_shape)
            )
            found = [entry for entry in times(Store(options.database).contents()) if options.machine in entry.name]
            if not found:
                parser.error(f"{options.database} has no times of {options.machine}")
            plans += planned(
                name, convolutions, max(found, key=lambda entry: sum(entry.knows(e.problem) for e in convolutions))
            )
    else:
        with tempfile.TemporaryDirectory() as folder:
            database = options.database or str(Path(folder) / "times.sqlite")
            convolutions = layers.convolutional(large_kernels, LARGE)
            store = Store(database)
            layers.measure(convolutions, settings(workspace_limit="unlimited", database=database), store)
            (known,) = times(store.contents())
            store.close()
            plans += planned("large kernels", convolutions, known)
            for row in plans:
                print(f"training within {format_bytes(row.total)}", file=sys.stderr)
                runs.append(trained(row.network, large_kernels, LARGE, row.total, row.kernels, database))
    solves = list(solved())
    made = list(tables(plans, runs, solves))
    show(made)
    if options.save:
        content = {"planned": plans, "trained": runs, "solved": solves}
        plain = {name: [asdict(row) for row in rows] for name, rows in content.items()}
        save(
            RESULT,
            "Workspace for a whole network, on a CPU",
            f"`python benchmarks/planning/sharing.py`: {before}",
            made,
            plain,
        )


if __name__ == "__main__":
    main()
