"""What a training step asks of CUDA and of the host's processor: waits, launches, microseconds. On the null card.

    NULL_CARD_ARITHMETIC=0 NULL_CARD_CONVOLUTIONS=0 python tests/null_card/build.py PYTHON benchmarks/gpu/null.py --save

Nothing is computed, so that only work of the host remains: the program's, torch's, cuDNN's, the libraries' and the null
card's own at each call. A step is forward, backward and the optimizer. It is measured in the processor's time of all
threads, as the median and as the least of steps that take turns with those of torch as it is; what a step takes longer
than torch's is told by convolution. A convolution is one direction here: forward, the gradient of the input, or that of
the weight. Waits are calls that make the host wait for the card. mucudnn's plans are made before, ahead, within 64 MiB
for each convolution; the last column tells how many kinds of convolution keep torch's own kernel, have another one, and
are divided. distconv is one rank of four in a fake group, whose messages arrive at once.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distconv
from benchmarks.distributed.host_messages import let_messages_arrive_at_once
from benchmarks.harness import finish, parser
from benchmarks.networks import NETWORKS
from benchmarks.table import Table
from distconv import settings
from mucudnn.convolution.call import Operands
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers.stock import STOCK, Stock
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings
from mucudnn.timing.measurement import Measurement

RESULT = "null-card-steps"
RANKS, WARM = 4, 3
COUNTS, COUNTED = ("waits", "executed", "launches"), ("waits", "convolutions", "launches")
PROGRAMS: dict[str, tuple[str, tuple[int, ...]]] = {
    "ResNet-18, 8 x 3 x 64²": ("resnet18", (8, 3, 64, 64)),
    "3-D U-Net, 4 x 1 x 16³": ("unet3d", (4, 1, 16, 16, 16)),
}
"""The name of a network, and the shape of its input."""

WIDTH = 8
"""Channels of the first stage; few, as the null card makes copies with the host's processor."""

LIMIT = "64MiB"
PARTITIONS = "sample=4", "height=4"

Figures = dict[str, dict[str, Any]]
Arm = tuple[Callable[[], None], Session | None]
"""A step, and the session that serves it."""


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward, backward and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    return step


def built(network: str) -> nn.Module:
    """Without a linear layer at its end, so that little but convolutions and norms is left."""
    torch.manual_seed(0)
    model = NETWORKS[network].build(width=WIDTH)
    if isinstance(getattr(model, "classifier", None), nn.Linear):
        model.classifier = nn.Identity()
    return model.cuda()


def timed(arms: Mapping[str, Arm], rounds: int) -> Figures:
    """Of each arm: the processor's milliseconds of a step, and what one more step asks of the card."""
    from null_card import counted

    found: Figures = {name: {"ms": []} for name in arms}
    for round in range(WARM + rounds + 1):
        for name, (step, session) in arms.items():
            shim.install(session)
            before = {count: counted(count) for count in COUNTS}
            start = time.process_time()
            step()
            milliseconds = 1e3 * (time.process_time() - start)
            if round < WARM:
                continue
            if round < WARM + rounds:
                found[name]["ms"].append(milliseconds)
            else:
                found[name] |= {count: counted(count) - before[count] for count in COUNTS}
    shim.install(None)
    for each in found.values():
        each |= {"ms": statistics.median(each["ms"]), "least ms": min(each["ms"])}
    stock = next(iter(found.values()))
    for each in found.values():
        for kind in ("ms", "least ms"):
            each[f"µs over torch, {kind}"] = 1e3 * (each[kind] - stock[kind]) / stock["executed"]
    return found


def by_plan(session: Session) -> str:
    """How many kinds of convolution keep torch's own kernel, have another one, and are divided."""
    kinds = Counter(
        "divided" if record.is_divided else "stock" if record.parts[0][1] == STOCK else "other"
        for record in session.records()
    )
    return " / ".join(str(kinds[kind]) for kind in ("stock", "other", "divided"))


def planned(program: str, rounds: int) -> Figures:
    """Plain torch beside mucudnn."""
    network, shape = PROGRAMS[program]
    step = step_of(built(network), torch.randn(shape, device="cuda"))
    chosen = {"workspace_limit": LIMIT, "database": ":memory:", "check": "off", "progress": "off"}
    sessions = [Session(Settings.from_environment({}, planning="ahead", **chosen)) for _ in range(2)]
    with without_stock():
        shim.install(sessions[1])
        step()
    arms: dict[str, Arm] = {
        "torch": (step, None),
        "mucudnn": (step, sessions[0]),
        "mucudnn, torch's own kernels left out": (step, sessions[1]),
    }
    found = timed(arms, rounds)
    for name, (_, session) in arms.items():
        found[name]["plans"] = by_plan(session) if session else ""
    return found


@contextmanager
def without_stock() -> Iterator[None]:
    """Plans that are made within leave out torch's own kernel, as if it took very long."""

    laps = TrialRunner.laps

    def slow(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        return [1e3] if trial.division is None else laps(runner, trial, given)

    with (
        patch.object(Measurement, "stock_seconds", lambda self: 1e3),
        patch.object(Stock, "algorithms", lambda self, problem: ()),
        patch.object(TrialRunner, "laps", slow),
    ):
        yield


def distributed(program: str, rounds: int) -> Figures:
    """Plain torch with the whole batch beside a rank of distconv's."""
    network, shape = PROGRAMS[program]
    x = torch.randn(shape, device="cuda")
    arms: dict[str, Arm] = {"torch": (step_of(built(network), x), None)}
    for partition in PARTITIONS:
        model = distconv.parallelize(built(network), distconv.init(partition, device_type="cuda"))
        step = step_of(model, x)
        arms[f"distconv, {partition}"] = step, None
        arms[f"distconv, {partition}, --check off"] = unchecked(step), None
    return timed(arms, rounds)


def unchecked(step: Callable[[], None]) -> Callable[[], None]:
    """The ranks do not compare what they hold."""

    def work() -> None:
        with settings.options({"check": "off"}):
            step()

    return work


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [f"{found[count]:,}" for count in COUNTS]
    times = [f"{found[kind]:.2f}" for kind in ("ms", "least ms")]
    over = [f"{found[f'µs over torch, {kind}']:.1f}" for kind in ("ms", "least ms")]
    return name, *counts, *times, *over, found.get("plans", "-")


def main() -> None:
    made = parser(__doc__, RESULT)
    made.add_argument("--rounds", type=int, default=25, help="steps that count (default %(default)s)")
    chosen = made.parse_args()
    if any(os.environ.get(name) != "0" for name in ("NULL_CARD_ARITHMETIC", "NULL_CARD_CONVOLUTIONS")):
        made.error("set NULL_CARD_ARITHMETIC=0 and NULL_CARD_CONVOLUTIONS=0, or the host computes what a card would")
    torch.set_num_threads(1)
    figures: dict[str, Figures] = {program: planned(program, chosen.rounds) for program in PROGRAMS}
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    let_messages_arrive_at_once()
    for program in PROGRAMS:
        figures[f"{program}, one rank of {RANKS}"] = distributed(program, chosen.rounds)
    headings = "", *COUNTED, "ms", "least ms", "µs over torch", "least µs", "stock / other / divided"
    tables = [Table(program, headings, [row(*each) for each in found.items()]) for program, found in figures.items()]
    finish(chosen, RESULT, "A training step on the null card", __doc__.split("\n\n")[2], tables)


if __name__ == "__main__":
    main()
