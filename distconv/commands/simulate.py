"""python -m distconv simulate: predicts how a training step scales with the ranks of a machine."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from distconv.commands.network import add_network_and_machine, network_of, one_line
from mucudnn.commands.arguments import add_json
from mucudnn.commands.output import add_wide
from mucudnn.sizes import format_bytes

BRIEF = "predict how a training step scales with the ranks of a machine"
DESCRIPTION = """\
Predicts training steps on growing numbers of ranks of a machine: with the samples alone divided, and with partitions of
space and channels as well. A step is recorded from distconv's own rules on tensors without data, on a rank with
neighbours on all sides, which all ranks like it take as long as; then its kernels and its messages are laid in time.

"""
EPILOG = """\
examples:
  python -m distconv simulate resnet50 --ranks 1,4,16,64 --batch 64 --machine lassen
  python -m distconv simulate resnet50 --ranks 4,64,1024 --batch 16 --weak --partition height=2,width=2 --machine lassen
"""


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    add_network_and_machine(parser)
    parser.add_argument("--ranks", required=True, metavar="N,...", help="numbers of ranks")
    parser.add_argument(
        "--weak",
        action="store_true",
        help="--batch is that of a rank, and grows with the ranks (default: of all ranks)",
    )
    parser.add_argument(
        "--partition",
        action="append",
        metavar="AXIS=RANKS,...",
        help="of the ranks that share a sample; may be given more than once (default: the most promising one)",
    )
    add_json(parser)
    add_wide(parser)


def command(options: Any) -> int:
    """Simulates, and prints a table."""
    from distconv.performance.machine import read_machine

    with one_line():
        machine = read_machine(options.machine)
        try:
            counts = sorted({int(text) for text in options.ranks.split(",")})
        except ValueError:
            counts = [0]
        if counts[0] < 1:
            raise ValueError(f"--ranks {options.ranks}: accepted: numbers of ranks, as 1,4,16")
        asked = network_of(options)
        found = [
            {"ranks": ranks, **point}
            for ranks in counts
            for point in _points(options, asked.model, asked.inputs(ranks if options.weak else 1), ranks, machine)
        ]
    if options.json:
        print(json.dumps({"machine": machine.name, "points": found}, indent=2))
    else:
        _show(machine.name, found, options.wide)
    return 0


def _points(options: Any, model: Any, shapes: list[tuple[int, ...]], ranks: int, machine: Any) -> list[dict[str, Any]]:
    from distconv.performance.imagined import imagined_job, mesh_of
    from distconv.performance.recording import record_step
    from distconv.performance.replay import replay
    from distconv.tensors.refusal import UnsupportedOperation

    points: list[dict[str, Any]] = []
    batch = shapes[0][0]
    with imagined_job(ranks):
        for partition in _partitions(options, model, shapes, ranks):
            point: dict[str, Any] = {"partition": str(partition), "batch": batch}
            try:
                step = record_step(model, mesh_of(partition), *shapes, batch_norm=options.batch_norm)
            except (UnsupportedOperation, RuntimeError) as error:
                points.append({**point, "refused": str(error).splitlines()[0]})
                continue
            times = replay(step, machine)
            points.append(
                {
                    **point,
                    "seconds": times.total,
                    "samples_per_second": batch / times.total,
                    "compute": times.compute,
                    "exposed": times.exposed,
                    "hidden": times.hidden,
                    "memory": step.saved + 3 * step.parameters,
                }
            )
    return points


def _partitions(options: Any, model: Any, shapes: list[tuple[int, ...]], ranks: int) -> list[Any]:
    """Samples alone, where there are as many as ranks; and what is asked for, or the most promising other one."""
    from distconv.performance.candidates import partitions, worthwhile
    from distconv.performance.layers import trace
    from distconv.settings.partition import Partition

    batch = shapes[0][0]
    samples = [Partition((("sample", ranks),))] if ranks <= batch else []
    if options.partition is None:
        graph = trace(model, *shapes)
        every = [one for one in partitions(ranks, len(graph.input)) if one not in samples]
        return samples + worthwhile(graph, every, 1)
    asked = []
    for text in options.partition:
        inner = Partition.parse(text)
        if "sample" in inner.names:
            raise ValueError(f"--partition {text}: accepted: axes other than sample, which gets the rest of the ranks")
        if ranks % inner.ranks == 0 and ranks // inner.ranks <= batch:
            share = ranks // inner.ranks
            asked.append(Partition((("sample", share), *inner.axes) if share > 1 else inner.axes))
    return samples + asked


def _show(machine: str, found: list[dict[str, Any]], wide: bool) -> None:
    from rich.table import Table

    from mucudnn.commands.output import show

    table = Table(box=None, pad_edge=False)
    table.add_column("ranks", justify="right")
    table.add_column("partition", overflow="fold")
    details = {"kernels ms": "compute", "waiting ms": "exposed", "hidden ms": "hidden"} if wide else {}
    for heading in ("batch", "ms a step", "samples/s", *details, "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in found:
        if "refused" in point:
            table.add_row(str(point["ranks"]), point["partition"], str(point["batch"]), "refused")
            continue
        times = (f"{1e3 * point[name]:.2f}" for name in details.values())
        table.add_row(
            str(point["ranks"]),
            point["partition"],
            str(point["batch"]),
            f"{1e3 * point['seconds']:.2f}",
            f"{point['samples_per_second']:.0f}",
            *times,
            format_bytes(math.ceil(point["memory"])),
        )
    refused = [
        f"refused: {point['partition']} on {point['ranks']} ranks: {point['refused']}"
        for point in found
        if "refused" in point
    ]
    assumed = f"machine: {machine}; kernels by a roofline, messages by latency and bandwidth"
    show(sys.stdout, assumed, table, *refused, wide=wide)
