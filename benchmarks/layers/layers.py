"""How much faster single convolutions are, divided within a workspace limit: forward and both backward passes.

    python benchmarks/layers/layers.py                      # everything, about an hour on two cores
    python benchmarks/layers/layers.py --only large         # the layers with large kernels
    python benchmarks/layers/layers.py --only volume        # one volume with a large kernel, cut along depth
    python benchmarks/layers/layers.py --only layout        # groups, which oneDNN computes faster in channels last
    python benchmarks/layers/layers.py --only resnet18

Three arms run in turn in one process: torch as it is ("stock"), the best algorithms on the undivided mini-batch
within the limit ("undivided"), and the division that mucudnn chooses within the limit ("divided"). What is shown are
medians of milliseconds, and how many times as fast as stock the other two are (median over rounds). The allocator is
told to keep freed memory, so that page faults do not fall on one arm by chance.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.allocator import keep_freed_memory
from benchmarks.harness import finish, joined, parser, turns
from benchmarks.layers.layer import Layer, convolutions
from benchmarks.networks import NETWORKS
from benchmarks.table import Table
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.providers import STOCK
from mucudnn.providers.fft import FFT, Fft
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings
from mucudnn.sizes import format_bytes
from mucudnn.timing import clock

MIB = 2**20
RESULT = "layers-cpu"
BATCHES = {"alexnet": 32, "vgg16": 4, "resnet18": 16, "resnet50": 8, "unet3d": 2, "cosmoflow": 2}
"""Mini-batch sizes of the networks here: what two cores do in about a second per layer."""

ROUND_SECONDS = 5.0
"""A layer's rounds, of one call per arm each, end after this time."""

LEAST_ROUNDS, MOST_ROUNDS = 7, 40

WARM_SECONDS = 0.15
"""Seconds. A call that takes longer is timed alone; a shorter one is called twice, the first time to warm up."""

SLOW_SECONDS, SLOW_ROUNDS = 5.0, 3
"""Where a call of torch's kernel takes longer than so many seconds, so many rounds are enough."""


@dataclass(frozen=True)
class Case:
    """A convolution to be timed under a limit in bytes."""

    group: str
    layer: Layer
    limit: float


@dataclass(frozen=True)
class Row:
    """What was measured of a case: median seconds, and the median over rounds of stock's time over the arm's."""

    group: str
    name: str
    limit: float
    count: int
    stock: float
    undivided: float
    divided: float
    undivided_speedup: float
    divided_speedup: float
    division: str


def layer_of(name: str, shape: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> Layer:
    """A layer of stride 1 whose output has the size of its input, to one element."""
    padding = tuple((kernel - 1) // 2 for kernel in weight[2:])
    ones = (1,) * len(padding)
    return Layer(name, shape, weight, ones, padding, ones, groups, False, (0,) * len(padding))


def fourier(layer: Layer) -> list[int]:
    """Bytes of workspace of an undivided Fourier transform, in each direction."""
    given: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    problems = (ConvProblem.of_convolution(one, layer.input, layer.weight, **given) for one in Direction)
    return [Fft().workspace(problem, FFT) for problem in problems]


def large_kernels() -> Iterator[Case]:
    """Kernels of 31x31 and of 1023 in 1-D: the Fourier transform is fastest, and its workspace grows with the batch."""
    for name, shape, weight in (
        ("31x31, 8x16x64x64", (8, 16, 64, 64), (16, 16, 31, 31)),
        ("1023, 16x16x8192", (16, 16, 8192), (16, 16, 1023)),
    ):
        layer = layer_of(name, shape, weight)
        yield Case("large", layer, 64 * MIB)
        wide = replace(layer, name=name.partition(",")[0] + ", batch 64", input=(64, *shape[1:]))
        yield Case("large", wide, math.inf)
        yield Case("large", wide, max(fourier(wide)) // 4)


def one_volume() -> Iterator[Case]:
    """A single volume with a 15x15x15 kernel, within a quarter of what an undivided Fourier transform needs."""
    layer = layer_of("15x15x15, 1x2x64x64x64", (1, 2, 64, 64, 64), (2, 2, 15, 15, 15))
    yield Case("volume", layer, min(fourier(layer)) // 4)


def grouped() -> Iterator[Case]:
    """Convolutions in groups, on contiguous tensors: some gradients are faster on channels-last copies."""
    for name, shape, weight in (
        ("5x5 depthwise, 8x64x56x56", (8, 64, 56, 56), (64, 1, 5, 5)),
        ("3x3x3 depthwise, 2x32x24x24x24", (2, 32, 24, 24, 24), (32, 1, 3, 3, 3)),
        ("3x3 in 32 groups, 8x128x28x28", (8, 128, 28, 28), (128, 4, 3, 3)),
    ):
        yield Case("layout", layer_of(name, shape, weight, shape[1] // weight[1]), 64 * MIB)


def of_network(name: str, limit: float) -> Iterator[Case]:
    """The distinct convolutions of a network."""
    for layer in convolutions(NETWORKS[name], BATCHES[name]):
        yield Case(name, layer, limit)


SPECIAL = {"large": large_kernels, "volume": one_volume, "layout": grouped}


def training_pass(layer: Layer) -> Callable[[], object]:
    """The convolution's forward and both backward passes."""
    torch.manual_seed(0)
    x = torch.randn(layer.input).requires_grad_()
    w = (torch.randn(layer.weight) / math.prod(layer.weight[1:]) ** 0.5).requires_grad_()
    geometry = (layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)
    gradient = torch.randn_like(torch.ops.aten.convolution(x, w, None, *geometry))
    return lambda: torch.autograd.grad(torch.ops.aten.convolution(x, w, None, *geometry), (x, w), gradient)


def measure(case: Case, database: str) -> Row:
    """Runs the three arms in turn."""

    def session(policy: str) -> Session:
        given = {"workspace_limit": case.limit, "policy": policy, "database": database, "planning": "ahead"}
        return Session(Settings.from_environment({}, **given))

    arms: dict[str, Session | None] = {
        "stock": None,
        "undivided": session("undivided"),
        "divided": session("powerOfTwo"),
    }
    work = training_pass(case.layer)

    def call(name: str) -> float:
        """Seconds of the second of two calls: the first finds in the caches what the arm before it left there."""
        shim.install(arms[name])
        seconds = clock.first_seconds(work)
        if seconds < WARM_SECONDS:
            seconds = clock.first_seconds(work)
        shim.install(None)
        return seconds

    *_, stock = [call(name) for name in reversed(arms)]  # measures, plans and warms up
    least = LEAST_ROUNDS if stock < SLOW_SECONDS else SLOW_ROUNDS
    times = turns({name: partial(call, name) for name in arms}, ROUND_SECONDS, least, MOST_ROUNDS)
    median = {name: statistics.median(values) for name, values in times.items()}

    def speedup(arm: str) -> float:
        return statistics.median(a / b for a, b in zip(times["stock"], times[arm], strict=True))

    divided = arms["divided"]
    assert divided is not None
    records = divided.records()
    left = all([name for _, name in record.parts] == [STOCK] for record in records)
    division = STOCK if left else "; ".join(record.division for record in records)
    speedups = speedup("undivided"), speedup("divided")
    return Row(case.group, case.layer.name, case.limit, case.layer.count, *median.values(), *speedups, division)


def details(rows: list[Row]) -> Table:
    """The rows for people."""
    arms = "stock ms", "undivided ms", "divided ms", "undivided x", "divided x"
    cells = []
    for row in rows:
        milliseconds = (f"{1e3 * seconds:.2f}" for seconds in (row.stock, row.undivided, row.divided))
        speedups = (f"{row.undivided_speedup:.2f}", f"{row.divided_speedup:.2f}")
        limit = format_bytes(row.limit)
        cells.append((f"{row.group} {row.name}", limit, *milliseconds, *speedups, row.division))
    title = f"forward + backward, {torch.get_num_threads()} threads"
    return Table(title, ("layer", "limit", *arms, "forward; backward data; backward filter"), cells)


def summary(rows: list[Row]) -> Table:
    """Per group: the geometric mean and the least of the divided arm's speed-ups, and the whole's time.

    Where every direction is left to torch's own kernel, both arms run the same code: what differs is noise.
    """
    cells = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        left = [row.divided_speedup for row in members if row.division == STOCK]
        taken = [row.divided_speedup for row in members if row.division != STOCK]
        whole = sum(row.stock * row.count for row in members) / sum(row.divided * row.count for row in members)
        numbers = statistics.geometric_mean([*left, *taken]), min(taken, default=None), min(left, default=None), whole
        texts = ("-" if number is None else f"{number:.3f}" for number in numbers)
        cells.append((group, str(len(members)), str(len(left)), *texts))
    headings = "layers", "left to stock", "geometric mean", "least", "least left to stock (noise)", "all layers' time"
    return Table("speed-up of the divided arm over stock", ("network", *headings), cells)


def main() -> None:
    made = parser(__doc__, RESULT)
    groups = [*SPECIAL, *BATCHES]
    made.add_argument("--only", action="append", choices=groups, help="a group of layers; may be repeated")
    made.add_argument("--limit", default="64MiB", help="workspace limit of the networks' layers (default %(default)s)")
    options = made.parse_args()
    limit = Settings.from_environment({}, workspace_limit=options.limit).workspace_limit
    keep_freed_memory()
    chosen = options.only or groups
    cases = [case for group in chosen for case in (SPECIAL[group]() if group in SPECIAL else of_network(group, limit))]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, str(Path(folder) / "times.sqlite")) for case in tqdm(cases, unit="layer", disable=None)]
    if options.save:  # groups that are not measured now stay as they are
        known = [Row(**row) for row in joined(RESULT, [])]
        rows = [*(row for row in known if row.group not in chosen), *rows]
    about = "`python benchmarks/layers/layers.py --save`, a group or several at a time; the last run:"
    figures = [asdict(row) for row in rows]
    title = "Single convolutions within a workspace limit, on a CPU"
    finish(options, RESULT, title, about, [summary(rows), details(rows)], figures)


if __name__ == "__main__":
    main()
