"""python -m distconv plan: finds the partition of every layer that a performance model expects to be the fastest."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distconv import settings
from distconv.commands.network import network_of
from distconv.job.launcher import BadInput
from distconv.model.strategy import as_toml, layer_text
from distconv.performance.machine import HERE, built_in
from distconv.settings.partition import AXES, read_memory
from mucudnn.commands.arguments import NAMES, add_json, add_network, check_writable, parse_shape
from mucudnn.commands.output import add_wide
from mucudnn.program import NotFound
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from distconv.performance.choice import LayerRow, PartitionPlanner, StepPlan

BRIEF = "choose the partition of every layer by a performance model"
DESCRIPTION = f"""\
Predicts how long a training step of a network takes under partitions of so many ranks, and chooses one for each layer.
Nothing is computed, and no other rank is needed: the step is that of distconv's own rules, recorded on tensors without
data, and its kernels and messages take as long as the machine file says (kernels by a roofline).

{NAMES}"""
EPILOG = """\
examples:
  python -m distconv plan torchvision.models:resnet50 --input 32,3,224,224 --ranks 16 --machine lassen
  python -m distconv plan nets.py:UNet --input 1,1,64,64,64 --ranks 4 --machine h100 --memory 80GiB -o strategy.toml
  python -m distconv plan package.module:Model --input 1,512,512,512 --ranks 64 --batch 4 --machine cluster.toml --json

then: python -m distconv run --strategy strategy.toml train.py
"""

OPTIMIZERS = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0}  # Numbers that an optimizer keeps for each parameter.


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    add_network(parser)
    parser.add_argument(
        "--also",
        type=partial(parse_shape, least=1),
        action="append",
        default=[],
        metavar="C,H,W",
        help="the shape of a further input of the model, as that of --input; may be given more than once",
    )
    parser.add_argument(
        "--machine",
        default=HERE,
        metavar="FILE",
        help=f"a machine file, here (this machine: the default, see calibrate), or one of {', '.join(built_in())}",
    )
    parser.add_argument(
        "--batch-norm", choices=["global", "local"], default="global", help="as of distconv run (default: global)"
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="the most memory that a rank may use, such as 16GiB, for parameters, gradients, optimizer and "
        "activations (default: no limit)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="momentum",
        help="the optimizer, for its update and the size of its state (default: momentum)",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="consider only partitions that match, such as 'sample=*'",
    )
    parser.add_argument(
        "--axes",
        metavar="NAME,...",
        help=f"consider partitions along these axes only, of {', '.join(AXES)} (default: all)",
    )
    parser.add_argument("--without", metavar="PATTERN", help="leave out partitions that match, such as '*channel=*'")
    parser.add_argument(
        "--candidates", type=int, metavar="N", help="the most partitions to compare (default: the best 40)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the strategy for distconv run --strategy")
    parser.add_argument(
        "--shard-parameters", action="store_const", const="on", help="plan for a job with --shard-parameters"
    )
    add_json(parser)
    add_wide(parser)


class Found(NamedTuple):
    """The best plan of so many ranks, its layers, the single partitions beside it, and what knows why."""

    plan: StepPlan
    rows: list[LayerRow]
    uniform: list[StepPlan]
    planner: PartitionPlanner


def command(options: Any) -> int:
    """Plans, and prints or writes what was found."""
    try:
        with settings.options({"shard_parameters": options.shard_parameters}):
            found = _planned(options)
            if options.output:
                Path(options.output).write_text(as_toml(found.plan.strategy))
    except (NotFound, ValueError, OSError) as error:
        raise BadInput(str(error).splitlines()[0]) from None
    if options.json:
        print(json.dumps(_plain(*found), indent=2))
    else:
        _show(*found, options.wide)
    return 0


def _planned(options: Any) -> Found:
    from distconv.performance.automatic import machine_here
    from distconv.performance.candidates import MOST, allowed, partitions, worthwhile
    from distconv.performance.choice import PartitionPlanner
    from distconv.performance.kept import Kept, kept_here
    from distconv.performance.layers import trace
    from distconv.performance.machine import read_machine
    from distconv.performance.without_data import imagined_job

    ranks = options.ranks
    if ranks < 1:
        raise ValueError(f"--ranks {ranks}: accepted: 1 or more")
    if options.output:
        check_writable("--output", options.output)
    machine = machine_here(ranks, Kept(kept_here())) if options.machine == HERE else read_machine(options.machine)
    model, inputs = network_of(options)
    graph, memory = trace(model, *inputs), read_memory(options.memory)
    axes = options.axes.split(",") if options.axes else None
    every = allowed(options.only, options.without, partitions(ranks, len(graph.input), axes))
    found = worthwhile(graph, every, options.candidates or MOST)
    if not found:
        raise ValueError(f"--ranks {ranks}: no partition of so many ranks divides an input {graph.input}")
    with imagined_job(ranks, machine.threads):
        planner = PartitionPlanner(
            model,
            graph,
            found,
            machine,
            states=OPTIMIZERS[options.optimizer],
            batch_norm=options.batch_norm,
            shown="off" if options.json else "auto",
        )
        plan = _best(planner, math.inf if memory is None else memory)
        return Found(plan, planner.rows(plan), planner.uniform(), planner)


def _best(planner: PartitionPlanner, limit: float) -> StepPlan:
    from mucudnn.optimizer import DoesNotFit

    try:
        return planner.best(limit)
    except DoesNotFit as error:
        least = f"the least is {format_bytes(math.ceil(error.least))}"
        raise ValueError(f"--memory {format_bytes(math.floor(limit))}: no choice fits; {least} on a rank") from None


def _show(plan: StepPlan, rows: list[LayerRow], uniform: list[StepPlan], planner: PartitionPlanner, wide: bool) -> None:
    from rich.table import Table

    from mucudnn.commands.output import show

    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "partition"):
        table.add_column(heading, overflow="fold")
    details = ["hidden ms", "moves ms", "allreduce ms"] if wide else []
    for heading in ("compute ms", "exchange ms", *details, "memory", "runner-up", "price ms"):
        name = heading == "runner-up"
        table.add_column(heading, justify="right", no_wrap=not name, overflow="fold" if name else "ellipsis")
    for row in rows:
        detail = [row.cost.hidden, row.moves, row.cost.gradients] if wide else []
        numbers = (row.cost.compute, row.cost.exchange, *detail)
        table.add_row(
            row.name,
            layer_text(row.partition, row.cost.algorithm),
            *(_milliseconds(seconds) for seconds in numbers),
            format_bytes(int(row.cost.bytes(planner.states))),
            "-" if row.runner_up is None else str(row.runner_up),
            "-" if row.runner_up is None else _milliseconds(row.price),
        )
    times = plan.times
    hidden = f"{1e3 * times.hidden:.2f} ms of messages hidden, {1e3 * times.exposed:.2f} ms waited for"
    kernels = "by a roofline" if planner.machine.measured is None else "as measured here"
    sentences = [
        f"machine: {planner.machine.name}; kernels {kernels}, messages by latency and bandwidth",
        *[f"the machine's figures were {planner.machine.doubt}"] * bool(planner.machine.doubt),
        f"{planner.partitions[0].ranks} ranks, one step: {1e3 * plan.seconds:.2f} ms"
        f" ({1e3 * times.compute:.2f} ms of kernels, {hidden},"
        f" {1e3 * plan.update:.2f} ms of the optimizer's update),"
        f" {format_bytes(int(plan.memory(planner.states)))} on a rank",
        *(
            f"{next(iter(other.layers.values()))} for all layers: {1e3 * other.seconds:.2f} ms,"
            f" {format_bytes(int(other.memory(planner.states)))}"
            for other in uniform
        ),
        *(f"left out: {partition}: {why}" for partition, why in planner.refusals.items()),
    ]
    if plan.gap:
        sentences.append(f"within the memory, another choice could be better by {100 * plan.gap:.2f} % at most")
    show(sys.stdout, table, "", *sentences, wide=wide)


def _milliseconds(seconds: float) -> str:
    """A dash where the layer has fewer elements than ranks along an axis, and was not looked at alone."""
    return f"{1e3 * seconds:.3f}" if math.isfinite(seconds) else "-"


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _plain(plan: StepPlan, rows: list[LayerRow], uniform: list[StepPlan], planner: PartitionPlanner) -> dict[str, Any]:
    return {
        "machine": planner.machine.name,
        "ranks": planner.partitions[0].ranks,
        "seconds": plan.seconds,
        "compute": plan.times.compute,
        "exposed": plan.times.exposed,
        "hidden": plan.times.hidden,
        "update": plan.update,
        "memory": plan.memory(planner.states),
        "gap": plan.gap,
        "strategy": dict(plan.strategy),
        "single": [
            {"partition": str(next(iter(other.layers.values()))), "seconds": other.seconds} for other in uniform
        ],
        "refused": planner.refusals,
        "layers": [
            {
                "layer": row.name,
                "partition": layer_text(row.partition, row.cost.algorithm),
                "compute": _finite(row.cost.compute),
                "exchange": row.cost.exchange,
                "hidden": row.cost.hidden,
                "moves": row.moves,
                "gradients": row.cost.gradients,
                "memory": row.cost.bytes(planner.states),
                "runner_up": None if row.runner_up is None else str(row.runner_up),
                "price": _finite(row.price),
            }
            for row in rows
        ],
    }
