"""Checked algorithms: are wrong ones caught, and right ones let through?

    python benchmarks/layers/checking.py --wrong 1000 --right 10000 --save    # ten minutes on one core

Convolutions are drawn as in convolutions.py, in float64, float32, bfloat16 or float16, with operands of both signs, of
one sign, or half of them zero, and computed whole and in two micro-batches.

    wrong    by an algorithm with a planted fault: a tap of the kernel that is left out, a part of a weight's gradient
             that overwrites what the parts before have added up to, or a border that is never written. A draw counts
             where the fault is of consequence: an element is off by a hundredth of the largest one, and by 16 units of
             rounding of the result's type.
    right    by each of mucudnn's algorithms of the host, torch's own kernel among them.

All are judged as before an algorithm is used: by comparison with torch's own kernel, and by single elements in float64.
Torch is asked without oneDNN, whose kernels are wrong for some convolutions (torch 2.13); `--onednn` leaves it on, and
the last table says how often torch's own results were then told of. The exit code is 1 where a wrong one was let
through, or a right one refused.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.layers.convolutions import draw, exact, operands
from benchmarks.table import Table, conditions, save, show
from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.optimizer import Division, Option
from mucudnn.providers import HOST_PROVIDERS, STOCK, Provider, stock_result
from mucudnn.providers.gemm import GEMM, Gemm
from mucudnn.timing.schedule import Schedule, WrongResult, compare_results

DTYPES = "float64", "float32", "bfloat16", "float16"
FAULTS = "a tap left out", "overwritten sums", "an unwritten border"
CONSEQUENCE, ROUNDINGS = 0.01, 16


class Planted(Gemm):
    """A right algorithm with a fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            before = part.target.clone()
            super().launch(algorithm, [part], accumulate and self._fault != "overwritten sums")
            if self._fault == "a tap left out":
                self._leave_out(part, accumulate)
            elif self._fault == "an unwritten border":
                edge = part.target[..., -1:]
                edge.copy_(torch.randn_like(edge) if bool(before.isnan().any()) else before[..., -1:])
            accumulate = part.problem.target is Role.W

    def _leave_out(self, part: Part, accumulate: bool) -> None:
        given, middle = part.operands, tuple(extent // 2 for extent in part.problem.w_shape[2:])
        if part.problem.target is Role.W:
            given.w[(..., *middle)] = 0
            return
        w = given.w.clone()
        w[(..., *middle)] = 0
        target = torch.empty_like(part.target)
        schedule = whole(part.problem, GEMM, Gemm())
        schedule.run(replace(given, w=w, **{str(part.problem.target): target}))
        part.target.copy_(target)


def whole(problem: ConvProblem, algorithm: str, provider: Provider, *extents: int) -> Schedule:
    """The problem by one algorithm, in parts of some samples each."""
    options = tuple(Option(extent, algorithm, 0.0, 0) for extent in extents or (problem.extent,))
    return Schedule(problem, Division(options), {algorithm: provider})


def drawn(number: int) -> tuple[ConvProblem, Operands]:
    """The convolution of a number, and what it is computed from."""
    random = Random(number)
    problem = replace(draw(number).problem, dtype=random.choice(DTYPES))
    given = operands(problem, number)
    kind = random.randrange(3)
    if kind == 1:
        given = replace(given, x=given.x.abs(), w=given.w.abs(), y=given.y.abs())
    elif kind == 2:
        given = replace(given, x=given.x.relu(), y=given.y * 1e-3)
    return problem, given


def results(
    problem: ConvProblem, given: Operands, providers: Sequence[Provider]
) -> Iterator[tuple[Schedule, Operands]]:
    """By every algorithm, whole and in two micro-batches: what computed it, and the operands with the result."""
    half = problem.extent // 2
    for provider in providers:
        for algorithm in provider.algorithms(problem):
            for extents in ((problem.extent,), (half, problem.extent - half)):
                if min(extents):
                    schedule = whole(problem, algorithm, provider, *extents)
                    target = torch.full_like(given.target(problem), math.nan)
                    ready = replace(given, **{str(problem.target): target})
                    schedule.run(ready)
                    yield schedule, ready


def is_of_consequence(found: Tensor, right: Tensor) -> bool:
    """Whether an element is off by so much that a fault cannot be taken for rounding."""
    off = (found.double() - right).abs()
    least = max(CONSEQUENCE, ROUNDINGS * torch.finfo(found.dtype).eps)
    return not bool((off <= least * right.abs().max()).all())


def wrong(count: int) -> dict[str, Any]:
    """How many of so many results with planted faults were caught, for every fault."""
    figures: dict[str, Any] = {}
    for fault in FAULTS:
        seen, caught, slight, missed, number = 0, 0, 0, [], 0
        with tqdm(total=count, desc=fault, unit="result") as bar:
            while seen < count:
                problem, given = drawn(number)
                number += 1
                stock = stock_result(problem, given)
                right = exact(problem, given)
                for schedule, ready in results(problem, given, [Planted(fault)]):
                    if seen == count:
                        break
                    if not is_of_consequence(ready.target(problem), right):
                        slight += 1
                        continue
                    told = faults(schedule, ready, stock)
                    is_caught = bool(told) and GEMM in told
                    seen, caught = seen + 1, caught + is_caught
                    missed += [] if is_caught else [f"{number - 1}: {problem.direction} {problem}"]
                    bar.update()
        figures[fault] = {"results": seen, "caught": caught, "of no consequence": slight, "missed": missed}
    return figures


def faults(schedule: Schedule, operands: Operands, other: torch.Tensor) -> dict[str, str] | None:
    """What `check` finds, whichever algorithm is wrong."""
    try:
        return compare_results(schedule, operands, other)
    except WrongResult as wrong:
        return dict(wrong.faults)


def right(count: int, first: int = 0) -> dict[str, Any]:
    """How many of so many results of the host's algorithms were refused, by algorithm, and torch's own told of."""
    counted: collections.Counter[str] = collections.Counter()
    refused: dict[str, str] = {}
    stocks: dict[int, str] = {}
    number = first
    with tqdm(total=count, unit="result") as bar:
        while counted.total() < count:
            problem, given = drawn(number)
            stock = stock_result(problem, given)
            for schedule, ready in results(problem, given, HOST_PROVIDERS):
                (algorithm, _), *_ = schedule.division.runs()
                told = faults(schedule, ready, stock) or {}
                counted[algorithm] += 1
                if STOCK in told:
                    stocks[number] = f"{problem.direction} {problem}: {told[STOCK]}"
                if algorithm != STOCK and algorithm in told:
                    refused[f"{number} {schedule.name}"] = f"{problem.direction} {problem}: {told[algorithm]}"
                bar.update()
            number += 1
    return {"results": dict(counted), "refused": refused, "torch's own": stocks, "convolutions": number - first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", type=int, default=1000, help="results with each planted fault (%(default)s)")
    parser.add_argument("--right", type=int, default=10000, help="results without (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first right convolution (%(default)s)")
    parser.add_argument("--onednn", action="store_true", help="leave torch's oneDNN on")
    parser.add_argument("--save", action="store_true", help="write table and figures to benchmarks/results")
    options = parser.parse_args()
    told = conditions()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(options.onednn)
    caught, let = wrong(options.wrong), right(options.right, options.first)
    rows = [
        (fault, *(str(caught[fault][name]) for name in ("results", "caught", "of no consequence"))) for fault in FAULTS
    ]
    refused = collections.Counter(name.split(":")[1].split("+")[0] for name in let["refused"])
    shown = [
        Table("Wrong algorithms", ("planted", "results", "caught", "of no consequence"), rows),
        Table(
            "Right algorithms",
            ("algorithm", "results", "refused"),
            [(name, str(number), str(refused[name])) for name, number in sorted(let["results"].items())],
        ),
        Table(
            "Torch's own kernel",
            ("convolutions", "told of"),
            [(str(let["convolutions"]), str(len(let["torch's own"])))],
        ),
    ]
    show(shown)
    if options.save:
        name = "checking_onednn" if options.onednn else "checking"
        save(name, "Checked algorithms", f"{__doc__}\n{told}", shown)
    missed = sum(figures["results"] - figures["caught"] for figures in caught.values())
    return int(bool(missed or let["refused"] or (let["torch's own"] and not options.onednn)))


if __name__ == "__main__":
    sys.exit(main())
