"""The first hour of live planning: programs run three times with one database, and networks with nothing to gain once.

    python benchmarks/planning/first_hour.py                     # 8 minutes
    python benchmarks/planning/first_hour.py --only resnet18 "blur, float64"
    python benchmarks/planning/first_hour.py --save              # as first-hour-cpu, and into docs/measured.md
    python benchmarks/planning/first_hour.py --planning ahead    # measured ahead in the place of live
    python benchmarks/planning/first_hour.py --device cuda:0     # seconds by the clock

In every run each step of the live arm has one of plain torch beside it, in the same process and on one thread, and what
counts is processor time. Every run begins with a new process, and the first one with a new database. A step of plain
torch of each arm comes before the others and does not count, so that neither pays for what torch makes ready once.
Processes keep memory that they free: what glibc gives back and takes anew, up to 5,000 pages a step, falls on either
arm by chance.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm import tqdm

import mucudnn
from benchmarks.harness import child, finish, parser
from benchmarks.planning.programs import DRAWN, HOUR
from benchmarks.table import Table
from mucudnn.runtime import shim

RUNS = 3
Arm = tuple[torch.nn.Module, Iterator[torch.Tensor], torch.optim.Optimizer]
KEPT = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
PAGE, HEADING, NEXT = Path(__file__).resolve().parents[2] / "docs" / "measured.md", "## The first hour", "\n## "


def beside(program: str, steps: int, database: str, planning: str, device: str) -> list[list[float]]:
    """Seconds of steps of plain torch and of the planned arm, in turn."""
    torch.set_num_threads(1)
    arms: list[Arm] = []
    for _ in range(2):
        torch.manual_seed(0)
        model, inputs = (HOUR | DRAWN)[program].make()
        arms.append((model.to(device), inputs, torch.optim.SGD(model.parameters(), 1e-5)))
    found: list[list[float]] = [[], []]
    for arm in arms:
        _train(arm, device)
    with mucudnn.patched(planning=planning, database=database, progress="off") as session:
        gc.collect()
        for step in range(steps):
            for place in (0, 1) if step % 2 else (1, 0):
                shim.install(session if place else None)
                found[place].append(_train(arms[place], device))
        shim.install(session)
    return found


def _train(arm: Arm, device: str) -> float:
    """Processor seconds of a step; on a GPU those of the clock."""
    model, inputs, optimizer = arm
    x = next(inputs).to(device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    optimizer.zero_grad()
    y = model(x)
    (y[0] if isinstance(y, tuple) else y).square().mean().backward()
    optimizer.step()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return clock() - start


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
        print(json.dumps(beside(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])))
        return
    made = parser(__doc__, "first-hour-cpu")
    made.add_argument("--only", nargs="+", choices=HOUR | DRAWN, default=list(HOUR | DRAWN), help="default: all")
    made.add_argument("--planning", choices=("live", "ahead"), default="live", help="(default %(default)s)")
    made.add_argument("--device", default="cpu", help="(default %(default)s)")
    chosen = made.parse_args()
    if chosen.save and (chosen.planning, chosen.device) != ("live", "cpu"):
        made.error("--save keeps the figures of live planning on a processor")
    figures: dict[str, list[Any]] = {}
    for name in tqdm(chosen.only, unit="program"):
        program = (HOUR | DRAWN)[name]
        with tempfile.TemporaryDirectory() as folder:
            words = ["--child", name, str(program.steps), f"{folder}/times.sqlite", chosen.planning, chosen.device]
            figures[name] = [child(__file__, *words, **KEPT) for _ in range(RUNS if name in HOUR else 1)]

    def ratio(run: list[list[float]], count: int = 1 << 30) -> str:
        return f"{sum(run[1][:count]) / sum(run[0][:count]):.2f}"

    what = "processor time" if chosen.device == "cpu" else "seconds"
    rows = [(name, f"{len(figures[name][0][0])}", *map(ratio, figures[name])) for name in HOUR if name in figures]
    tables = [Table(f"{chosen.planning} over plain torch, {what}", ("", "steps", "run 1", "run 2", "run 3"), rows)]
    rows = [(name, ratio(figures[name][0], 10), ratio(figures[name][0], 50)) for name in DRAWN if name in figures]
    tables.append(
        Table(f"nothing to gain, first run: {chosen.planning} over plain torch", ("", "10 steps", "50 steps"), rows)
    )
    if chosen.save:
        PAGE.write_text(write(PAGE.read_text(), tables))
    about = (__doc__ or "").strip().split("\n\n")[-1]
    finish(chosen, "first-hour-cpu", "The first hour of live planning", about, tables)


if __name__ == "__main__":
    main()
