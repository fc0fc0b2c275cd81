"""Random convolutions within random limits, by mucudnn's algorithms of the host: right, and within the limit?

    python benchmarks/layers/convolutions.py --convolutions 1000    # two minutes on one core; goes on where it stopped
    python benchmarks/layers/convolutions.py --convolutions 10000 --save

A convolution has 1 to 3 dims of space, strides, dilations, padding and groups, is transposed or not, in float32 or
bfloat16, and is asked for in one of three directions. A limit, a policy and whether torch is to be deterministic are
drawn too. mucudnn plans it and computes it twice. Times are drawn as well, so that every division comes about, not only
what is fast on this machine. Compared with torch's own result:

    error          against float64, more than four times torch's own, and than four units of rounding of the largest
                   element or product
    over limit     the plan says that it needs more workspace than the limit, and is not torch's own kernel undivided,
                   which is left where nothing fits
    uncounted      torch's memory profiler counts more bytes, beyond operands and result, than the plan says
    unlike again   with deterministic algorithms asked for, a second computation gives other bits

Parts by torch's own kernel are outside the limit: its scratch memory is not counted, here or there; of the images of
`slices` it is counted here by a call of each. In float32 torch is asked without oneDNN, whose kernels are wrong, or
write beyond their memory, for some of these convolutions (torch 2.13). The exit code is 1 where there is any of these.
`--first` starts further on in the numbers. What earlier runs have found of them is in `--partial`, so remove that after
a change.
"""

from __future__ import annotations

import collections
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.drawn_times import drawn_times
from benchmarks.harness import Records, finish, parser
from benchmarks.table import RESULTS, Table
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import tile
from mucudnn.optimizer import POLICIES
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner, scratch
from mucudnn.providers import STOCK, stock_result
from mucudnn.providers.slices import SLICES, Slices
from mucudnn.settings import Settings
from mucudnn.timing.store import Store

ERROR_FACTOR, ROUNDINGS = 4.0, 4.0
FAULTS = ("error", "over limit", "uncounted", "unlike again", "crash")
SLACK = 512
"""Bytes by which the profiler may count more: torch rounds each allocation up to 64."""


class Asked(NamedTuple):
    """One convolution and how it is to be computed."""

    problem: ConvProblem
    limit: int | float
    policy: str
    deterministic: bool


def draw(seed: int) -> Asked:
    """What a seed asks for."""
    random = Random(seed)
    while True:
        try:
            problem = _problem(random)
        except ValueError:  # a transposed convolution whose padding eats its whole output
            continue
        if math.prod(problem.y_shape) * math.prod(problem.w_shape[1:]) <= 1 << 22:
            break
    limit = random.choice((1 << random.randrange(8, 22), 1 << random.randrange(8, 22), math.inf))
    return Asked(problem, limit, random.choice(sorted(POLICIES)), random.random() < 0.5)


def _problem(random: Random) -> ConvProblem:
    dims = random.randint(1, 3)

    def per_dim(choices: Iterable[int]) -> tuple[int, ...]:
        drawn = list(choices)
        return tuple(random.choice(drawn) for _ in range(dims))

    groups = random.choice((1, 1, 1, 2, 3))
    kernel, stride, dilation = per_dim((1, 2, 3, 3, 4, 5, 7)), per_dim((1, 1, 1, 2, 3)), per_dim((1, 1, 1, 2, 3))
    padding = tuple(random.randint(0, d * (k - 1)) for k, d in zip(kernel, dilation, strict=True))
    transposed = random.random() < 0.25
    channels, filters = groups * random.randint(1, 4), random.randint(1, 5)
    spatial = per_dim(range(1, {1: 40, 2: 18, 3: 9}[dims]))
    output_padding = None
    if transposed:
        output_padding = tuple(random.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
        weight = (channels, filters, *kernel)
    else:
        weight = (filters * groups, channels // groups, *kernel)
        reaches = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        spatial = tuple(max(n, r - 2 * p) for n, r, p in zip(spatial, reaches, padding, strict=True))
    return ConvProblem.of_convolution(
        random.choice(list(Direction)),
        (random.choice((1, 2, 3, 4, 6, 8, 9)), channels, *spatial),
        weight,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        transposed=transposed,
        output_padding=output_padding,
        dtype=random.choice(("float32", "float32", "bfloat16")),
    )


def operands(problem: ConvProblem, seed: int) -> Operands:
    """Random operands; the target is filled with NaN, so that what is not written is seen."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    tensors: dict[str, Any] = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, problem.dtype))
        for name, shape in shapes.items()
    }
    tensors[str(problem.target)] = torch.full_like(tensors[str(problem.target)], math.nan)
    return Operands(**tensors)


def exact(problem: ConvProblem, given: Operands) -> Tensor:
    """The target in float64 by torch's own kernel."""
    wide = {str(role): getattr(given, role).double() for role in Role}
    return stock_result(replace(problem, dtype="float64"), Operands(**wide))


def computed(plan: Plan, given: Operands) -> Tensor:
    """What a plan makes of operands."""
    target = torch.full_like(given.target(plan.problem), math.nan)
    plan.schedule.run(replace(given, **{str(plan.problem.target): target}))
    return target


def peak(plan: Plan, given: Operands) -> int:
    """The most bytes that torch's memory profiler counts at once while a plan runs, beyond what was there before."""
    target = torch.full_like(given.target(plan.problem), math.nan)
    ready = replace(given, **{str(plan.problem.target): target})
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.empty(1, dtype=torch.uint8)  # its event tells what the profiler already counted as alive
        plan.schedule.run(ready)
    events = list(_allocations(profile.profiler.kineto_results.experimental_event_tree()))
    start = next(event.total_allocated - 1 for event in events if event.alloc_size == 1)
    return int(max(event.total_allocated for event in events) - start)


def allowed(plan: Plan) -> int:
    """The most bytes that a plan may take: what it says, and what torch's own kernel of images takes in `slices`."""
    problem, division = plan.problem, plan.division
    slices = [
        Slices(scratch).workspace(tile(problem, Dim(division.dim), 0, option.extent).problem, SLICES)
        for option in division.options
        if option.algorithm == SLICES
    ]
    return max([division.workspace, *slices])


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag.name == "Allocation":
            yield event.extra_fields
        yield from _allocations(event.children)


def judged(seed: int) -> dict[str, Any]:
    """What becomes of the convolution of a seed: its faults, its division, and how far it is from float64."""
    problem, limit, policy, deterministic = draw(seed)
    torch.use_deterministic_algorithms(deterministic)
    settings = Settings.from_environment(
        {}, workspace_limit=limit, policy=policy, database=":memory:", progress="off", log=None
    )
    given = operands(problem, seed)
    record: dict[str, Any] = {"number": seed, "problem": f"{problem.direction} {problem}", "dtype": problem.dtype}
    record |= {"limit": limit if math.isfinite(limit) else None, "policy": policy, "faults": []}
    try:
        with drawn_times(seed):
            store = Store(":memory:")
            planner = Planner(settings, store)
            plan = planner.plan(planner.measurement(problem, given, given.target(problem).stride()))
        own = stock_result(problem, given)
        found = own if plan.is_stock else computed(plan, given)  # as a program has it
        again = computed(plan, given) if deterministic and not plan.is_stock else found
        used = 0 if plan.is_stock else peak(plan, given)
    except Exception as error:
        return record | {"faults": ["crash"], "said": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.use_deterministic_algorithms(False)
    right = exact(problem, given)
    error, stock_error = (float((y.double() - right).abs().max()) for y in (found, own))
    factors = [float(getattr(given, role).abs().max()) for role in Role if role is not problem.target]
    unit = torch.finfo(found.dtype).eps * max(float(right.abs().max()), math.prod(factors))
    if not error <= ERROR_FACTOR * max(stock_error, ROUNDINGS * unit / ERROR_FACTOR):
        record["faults"].append("error")
    if plan.division.workspace > limit and not plan.is_stock:
        record["faults"].append("over limit")
    # "stock@channels_last" is torch's own kernel, too.
    algorithms = {algorithm.partition("@")[0] for algorithm, _ in plan.division.runs()}
    if STOCK not in algorithms and used > allowed(plan) + SLACK:
        record["faults"].append("uncounted")
    if not torch.equal(found, again):
        record["faults"].append("unlike again")
    parts = "+".join(f"{len(sizes)} {name}" for name, sizes in plan.division.runs())
    figures = {"error": error / (unit or 1.0), "stock_error": stock_error / (unit or 1.0), "used": used}
    return record | figures | {"parts": parts, "workspace": plan.division.workspace, "dim": plan.division.dim}


def tables(records: list[dict[str, Any]]) -> list[Table]:
    """Faults by what computes, and the largest errors."""
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in records:
        names = sorted({part.split()[1] for part in record.get("parts", "").split("+") if part})
        pieces = sum(int(part.split()[0]) for part in record.get("parts", "").split("+") if part)
        groups[f"{' and '.join(names) or 'none'}, {'divided' if pieces > 1 else 'whole'}"].append(record)
    groups = dict(sorted(groups.items())) | {"all": records}
    rows = []
    for name, group in groups.items():
        counted = collections.Counter(fault for record in group for fault in record["faults"])
        worst = max((r["error"] for r in group if "error" in r), default=0.0)
        stock = max((r["stock_error"] for r in group if "error" in r), default=0.0)
        figures = (f"{worst:.1f}", f"{stock:.1f}")
        rows.append((name, str(len(group)), *(str(counted[fault]) for fault in FAULTS), *figures))
    headings = ("computed by", "number", *FAULTS, "largest error", "torch's own")
    return [Table("Random convolutions (errors in units of rounding)", headings, rows)]


def main() -> int:
    made = parser(__doc__, "convolutions")
    made.add_argument("--convolutions", type=int, default=1000, help="how many (%(default)s)")
    made.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    made.add_argument("--minutes", type=float, default=600.0, help="after which no further one starts (%(default)s)")
    partial = RESULTS / "convolutions-partial.jsonl"
    made.add_argument("--partial", type=Path, default=partial, help="what is kept between runs (%(default)s)")
    options = made.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    end, kept, records = time.monotonic() + 60 * options.minutes, Records(options.partial, "number"), []
    for number in tqdm(range(options.first, options.first + options.convolutions), unit="convolution", disable=None):
        if number not in kept.found:
            if time.monotonic() > end:
                break
            kept.add(judged(number))
        records.append(kept.found[number])
        if records[-1]["faults"]:
            tqdm.write(str(records[-1]))
    finish(options, "convolutions", "Random convolutions", __doc__, tables(records))
    return int(any(record["faults"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
