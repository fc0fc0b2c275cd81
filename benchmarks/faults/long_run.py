"""Twenty thousand steps, and shapes that never come again: does memory grow, do steps slow down?

    python benchmarks/faults/long_run.py                             # about seven minutes on two cores
    python benchmarks/faults/long_run.py --steps 2000 --shapes 500   # one minute
    python benchmarks/faults/long_run.py --save                      # keeps table and figures in benchmarks/results

*The same shapes*: a small network (convolutions, norms, a pool, a linear layer) trains on two ranks, height=2, over
Gloo. A hundred times memory, Python's objects and the processor's time for a step are read. After the warm-up, the
first tenth, memory may grow by 1 % and objects by 0.1 %, and the last thousand steps may take 10 % more time than the
first.

*Shapes that never come again*: the same network, whose every batch has another height and width. What is kept by shapes
has a bound, see "Shapes that keep changing" in the documentation; the memory that a thousand shapes add is told, and
what a shape costs that is new, known, or was known and has been forgotten. Likewise convolutions under mucudnn's shim
in one process.

The exit code is 1 where memory, objects or times of the same shapes grow by more than that, or where a cache holds more
than its bound.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.harness import finish, parser
from benchmarks.rank_pool import RankPool
from benchmarks.table import Table

MEMORY, OBJECTS, SLOWER = 0.01, 0.001, 0.10
"""What may be added to memory, objects and the time of a step, relative."""

READINGS, THOUSANDTH = 100, 5
"""How often memory is read, and how many readings are a twentieth of all: a thousand steps of 20,000."""

Figures = dict[str, Any]


def network() -> nn.Module:
    """Serves images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def resident() -> float:
    """MiB of this process that are in memory, after what nobody holds has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon:"))


def caches() -> Iterator[tuple[str, int, int | None]]:
    """Every cache of functions in distconv and mucudnn: its name, how much it holds, and its bound."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("distconv", "mucudnn")):
            for what, found in list(vars(module).items()):
                if isinstance(found, _lru_cache_wrapper) and found.__module__ == name:
                    info = found.cache_info()
                    yield f"{name}.{what}", info.currsize, info.maxsize


class Rank:
    """What a rank does when it is asked."""

    def __init__(self) -> None:
        import distconv

        torch.manual_seed(0)
        mesh = distconv.init("height=2", device_type="cpu")
        self._model = distconv.parallelize(network(), mesh)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._targets = torch.tensor([0, 1])

    def steps(self, count: int, shapes: Sequence[tuple[int, int]]) -> Figures:
        """Takes so many steps, the shapes in turn; what a step took, and what is held after the last."""
        begin, busy = time.perf_counter(), time.process_time()
        for step in range(count):
            self._optimizer.zero_grad()
            y = self._model(torch.ones(2, 3, *shapes[step % len(shapes)]))
            nn.functional.cross_entropy(y, self._targets).backward()
            self._optimizer.step()
        seconds, processor = (time.perf_counter() - begin) / count, (time.process_time() - busy) / count
        return {"seconds": seconds, "processor": processor, "MiB": resident(), "objects": len(gc.get_objects())}

    def caches(self) -> list[tuple[str, int, int | None]]:
        return list(caches())


def steps(pool: RankPool, count: int, shapes: Sequence[tuple[int, int]]) -> Figures:
    """The most that any rank takes and holds."""
    answers = pool.result("steps", count, shapes, within=3600)
    return {name: max(each[name] for each in answers) for name in answers[0]}


def growth(readings: Sequence[Figures]) -> Figures:
    """By how much, relative, memory, objects and the time of a step grow after the warm-up."""
    after = readings[max(1, len(readings) // 10) :]
    found = {name: after[-1][name] / after[0][name] - 1 for name in ("MiB", "objects")}
    # The least of several: what else the machine does only adds.
    first, last = (min(each["processor"] for each in some) for some in (after[:THOUSANDTH], after[-THOUSANDTH:]))
    return found | {"processor": last / first - 1, "first": first, "last": last}


def faults(grown: Figures) -> list[str]:
    """What grows by more than it may."""
    allowed = {"MiB": MEMORY, "objects": OBJECTS, "processor": SLOWER}
    return [f"{name}: {100 * grown[name]:+.2f} %" for name, most in allowed.items() if grown[name] > most]


def changing(number: int) -> tuple[int, int]:
    """The height and width of a batch, all unlike."""
    return 9 + number % 97, 9 + number // 97


def changing_shapes(pool: RankPool, shapes: int) -> Figures:
    """Memory after every tenth of so many shapes, and what a step of a new, a known and a forgotten shape takes."""
    part = max(1, shapes // 10)
    some = min(50, part)

    def of(start: int, count: int) -> Figures:
        return steps(pool, count, [changing(number) for number in range(start, start + count)])

    readings = [of(start, part) for start in tqdm(range(0, part * 10, part), desc="changing shapes", disable=None)]
    known, met_first = of(part * 10 - some, some)["seconds"], of(0, some)["seconds"]
    held = [each for answer in pool.result("caches") for each in answer]
    return {"readings": readings, "shapes": part * 10, "known": known, "met first": met_first, "caches": held}


def under_mucudnn(shapes: int) -> Figures:
    """Convolutions of shapes that never come again under the shim, in one process: decisions, and memory."""
    import mucudnn
    from mucudnn.runtime import shim

    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    memory = []
    with mucudnn.patched(database=":memory:", workspace_limit="1MiB", progress=False):
        for tenth in tqdm(range(10), desc="under mucudnn", disable=None):
            begin = time.perf_counter()
            for number in range(tenth * shapes // 10, (tenth + 1) * shapes // 10):
                height, width = changing(number)
                nn.functional.conv2d(torch.ones(1, 3, height, width), w).sum().backward()
            seconds = (time.perf_counter() - begin) / max(1, shapes // 10)
            memory.append({"MiB": resident(), "seconds": seconds})
        session = shim.current_session()
        assert session is not None
        return {"readings": memory, "decisions": len(session.decisions), "most": session.decisions.most}


def tables(readings: Sequence[Figures], grown: Figures, changed: Figures, beneath: Figures) -> list[Table]:
    """For people."""
    warm, last = readings[max(1, len(readings) // 10)], readings[-1]
    steps = [
        ("MiB of a rank", f"{warm['MiB']:.1f}", f"{last['MiB']:.1f}", f"{100 * grown['MiB']:+.2f} %"),
        ("objects of Python", str(warm["objects"]), str(last["objects"]), f"{100 * grown['objects']:+.3f} %"),
        (
            "ms of the processor for a step",
            *(f"{1e3 * grown[name]:.2f}" for name in ("first", "last")),
            f"{100 * grown['processor']:+.1f} %",
        ),
    ]
    rows = []
    for number, (ranks, alone) in enumerate(zip(changed["readings"], beneath["readings"], strict=True), start=1):
        shapes = f"{number * changed['shapes'] // 10}"
        rows.append((
            shapes, f"{ranks['MiB']:.0f}", str(ranks["objects"]), f"{1e3 * ranks['seconds']:.1f}",
            f"{alone['MiB']:.0f}", f"{1e3 * alone['seconds']:.1f}",
        ))  # fmt: skip
    costs = [
        ("new", f"{1e3 * changed['readings'][0]['seconds']:.1f}"),
        ("known", f"{1e3 * changed['known']:.1f}"),
        ("met first, after all others", f"{1e3 * changed['met first']:.1f}"),
    ]
    fullest = sorted({(size, name, most) for name, size, most in changed["caches"] if most}, reverse=True)[:8]
    return [
        Table("The same shapes", ("what", "after the warm-up", "at the end", "growth"), steps),
        Table(
            "Shapes that never come again",
            ("shapes so far", "MiB of a rank", "objects", "ms of a step", "MiB under mucudnn", "ms of a call there"),
            rows,
        ),
        Table("A step of a shape that is", ("shape", "ms"), costs),
        Table("The fullest caches", ("cache", "holds", "at most"), [(n, str(s), str(m)) for s, n, m in fullest]),
    ]


def main() -> int:
    """Runs all and prints it; the exit code."""
    made = parser(__doc__, "long-run")
    made.add_argument("--steps", type=int, default=20_000, help="of the same shapes (%(default)s)")
    made.add_argument("--shapes", type=int, default=6000, help="that never come again (%(default)s)")
    options = made.parse_args()
    torch.set_num_threads(1)
    pool = RankPool(2, Rank)
    try:
        count = max(1, options.steps // READINGS)
        readings = [steps(pool, count, [(16, 16)]) for _ in tqdm(range(READINGS), desc="same shapes", disable=None)]
        changed = changing_shapes(pool, options.shapes)
    finally:
        pool.close()
    beneath = under_mucudnn(options.shapes)
    grown = growth(readings)
    finish(options, "long-run", "Long runs", __doc__, tables(readings, grown, changed, beneath))
    found = faults(grown)
    found += [f"{name} holds more than its bound" for name, size, most in changed["caches"] if most and size > most]
    found += ["decisions: more than their bound"] * (beneath["decisions"] > beneath["most"])
    print(*found, sep="\n", end="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
