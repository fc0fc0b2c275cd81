"""The first hour of live planning: programs run three times with one database, and networks with nothing to gain once.

    python benchmarks/planning/first_hour.py                     # 8 minutes
    python benchmarks/planning/first_hour.py --only resnet18 "blur, float64"
    python benchmarks/planning/first_hour.py --save              # as first-hour-cpu, and into docs/measured.md

In every run each step of the live arm has one of plain torch beside it, in the same process and on one thread, and what
counts is processor time. Every run begins with a new process, and the first one with a new database. A step of plain
torch comes before the others and does not count, so that neither arm pays for the kernels that torch makes ready once.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from tqdm import tqdm

import mucudnn
from benchmarks.planning.drawn import DRAWS, drawn
from benchmarks.planning.planning import Program, network, same, shapes, slices
from benchmarks.table import Table, conditions, save, show
from mucudnn.networks.models import NETWORKS
from mucudnn.runtime import shim

RUNS = 3
PAGE, HEADING, NEXT = Path(__file__).resolve().parents[2] / "docs" / "measured.md", "## The first hour", "\n## "


def long_kernel() -> tuple[nn.Module, Iterator[Tensor]]:
    return nn.Conv1d(8, 8, 1024, padding=512), same(torch.randn(2, 8, 16000))


def depthwise_volume() -> tuple[nn.Module, Iterator[Tensor]]:
    return nn.Conv3d(32, 32, 5, padding=2, groups=32), same(torch.randn(1, 32, 32, 32, 32, requires_grad=True))


def blur() -> tuple[nn.Module, Iterator[Tensor]]:
    """A wide blur of images in float64, each channel by itself."""
    layer = nn.Conv2d(3, 3, 61, padding=30, groups=3, bias=False).double()
    return layer, same(torch.randn(1, 3, 128, 128, dtype=torch.float64))


def volume() -> tuple[nn.Module, Iterator[Tensor]]:
    """The 3-D U-Net on a volume of an eighth of the usual size."""
    found = NETWORKS["unet3d"]
    channels, *sides = found.input_shape
    return found.build(), same(torch.randn(1, channels, *(side // 2 for side in sides)))


def network_of(seed: int) -> Callable[[], tuple[nn.Module, Iterator[Tensor]]]:
    def made() -> tuple[nn.Module, Iterator[Tensor]]:
        model, x = drawn(seed)
        return model, same(x)

    return made


DRAWN = {f"{'U-Net' if seed % 2 else 'residual'} {seed}": Program(network_of(seed), 50) for seed in range(DRAWS)}
HOUR = {
    "long kernel, 1-D": Program(long_kernel, 12),
    "depthwise 5x5x5": Program(depthwise_volume, 12),
    "blur, float64": Program(blur, 12),
    "slices": Program(slices, 10),
    "resnet18": Program(network("resnet18", 2), 10),
    "vgg16": Program(network("vgg16", 1), 5),
    "unet3d": Program(volume, 5),
    "shapes": Program(shapes, 100),
    "alexnet": Program(network("alexnet", 4), 10),
    "densenet": Program(network("densenet40", 4), 10),
}
"""Programs of the first hour, each run three times."""


def beside(program: str, steps: int, database: str) -> list[list[float]]:
    """Processor seconds of steps of plain torch and of the live arm, in turn."""
    torch.set_num_threads(1)
    arms = []
    for _ in range(2):
        torch.manual_seed(0)
        arms.append((HOUR | DRAWN)[program].make())
    found: list[list[float]] = [[], []]
    _train(arms[0])
    with mucudnn.patched(planning="live", database=database, progress="off") as session:
        gc.collect()
        for step in range(steps):
            for arm in (0, 1) if step % 2 else (1, 0):
                shim.install(session if arm else None)
                found[arm].append(_train(arms[arm]))
        shim.install(session)
    return found


def _train(arm: tuple[nn.Module, Iterator[Tensor]]) -> float:
    """Processor seconds of a step."""
    model, inputs = arm
    x = next(inputs)
    start = time.process_time()
    model.zero_grad()
    y = model(x)
    (y[0] if isinstance(y, tuple) else y).square().mean().backward()
    return time.process_time() - start


def write(page: str, tables: list[Table]) -> str:
    """The page of what is measured, with the tables as its section on the first hour."""
    about = (
        "The tables show the processor time of training under live planning, in units of plain torch's. The first run "
        "of a program\nfinds an empty database; each later run finds what those before it have left "
        "(`python benchmarks/planning/first_hour.py`;\n[all figures](results/first-hour-cpu.md)). The second table has "
        "drawn networks in which there is nothing to gain:"
    )
    section = "\n\n".join([HEADING, about, *(table.markdown() for table in tables)])
    before, found, rest = page.partition(HEADING)
    if not found:
        at = page.index("## The overhead of mucudnn")
        before, rest = page[:at], f"\n{page[at:]}"
    return f"{before}{section}\n{rest[rest.index(NEXT) :]}"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(beside(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=HOUR | DRAWN, default=list(HOUR | DRAWN), help="default: all")
    parser.add_argument("--save", action="store_true", help="as results/first-hour-cpu and in docs/measured.md")
    chosen = parser.parse_args()
    figures: dict[str, list[Any]] = {}
    for name in tqdm(chosen.only, unit="program"):
        program = (HOUR | DRAWN)[name]
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--child", name, str(program.steps), f"{folder}/times.sqlite"]
            for _ in range(RUNS if name in HOUR else 1):
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                figures.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))

    def ratio(run: list[list[float]], count: int = 1 << 30) -> str:
        return f"{sum(run[1][:count]) / sum(run[0][:count]):.2f}"

    rows = [(name, f"{len(figures[name][0][0])}", *map(ratio, figures[name])) for name in HOUR if name in figures]
    tables = [Table("live over plain torch, processor time", ("", "steps", "run 1", "run 2", "run 3"), rows)]
    rows = [(name, ratio(figures[name][0], 10), ratio(figures[name][0], 50)) for name in DRAWN if name in figures]
    tables.append(Table("nothing to gain, first run: live over plain torch", ("", "10 steps", "50 steps"), rows))
    if chosen.save:
        PAGE.write_text(write(PAGE.read_text(), tables))
        about = f"{(__doc__ or '').strip().split(chr(10) * 2)[-1]}\n\n{conditions()}"
        save("first-hour-cpu", "The first hour of live planning", about, tables)
    show(tables)


if __name__ == "__main__":
    main()
