"""The partition of every layer of a script's model, chosen for so many ranks of this machine, once.

`distconv run --partition auto` starts this as a process of its own, before there are ranks:

    python -m distconv.performance.automatic RANKS BATCH_NORM STRATEGY.toml (script|module) NAME [ARGUMENTS...]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from distconv.partition import Partition
from distconv.performance.candidates import partitions, worthwhile
from distconv.performance.choice import Planner
from distconv.performance.first_call import first_call
from distconv.performance.imagined import imagined_job, mesh_of
from distconv.performance.kept import Kept, kept_here
from distconv.performance.kernels import Measured, measured_for
from distconv.performance.layers import LayerGraph, trace
from distconv.performance.machine import HERE, Machine, here, read
from distconv.performance.recording import record_step
from distconv.performance.replay import replay
from mucudnn import program
from mucudnn.version import VERSION

MOST = 12
"""Partitions that are looked at: each layer's kernels are measured under all of them."""

ONE = {"*": "sample=1"}
"""The strategy of one process."""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        strategy: {pattern of layer names: partition}, as `distconv.model.strategy` reads it; `ONE`, of one rank, where
            one process is the fastest.
        seconds: of a step, as predicted.
        alone: those of a step in one process; None where a step cannot be recorded so.
    """

    strategy: Mapping[str, str]
    seconds: float
    alone: float | None

    def __str__(self) -> str:
        if self.strategy == ONE:
            return f"one process; predicted {1e3 * self.seconds:.1f} ms a step"
        chosen = ", ".join(f"{pattern}: {partition}" for pattern, partition in self.strategy.items())
        text = f"{chosen.removeprefix('*: ')}; predicted {1e3 * self.seconds:.1f} ms a step"
        return text if self.alone is None else f"{text}, one process {1e3 * self.alone:.1f} ms"


def machine_here(ranks: int, kept: Kept) -> Machine:
    """What `distconv calibrate` has measured, with kernels measured as they are asked for.

    Args:
        ranks: of the job, which share this machine's cores.

    Raises:
        MachineError: one line, where the machine has not been measured.
    """
    machine = read(HERE)
    measured = measured_for(min(ranks, machine.node.ranks), kept)
    return replace(machine, measured=measured, threads=measured.threads)


def choose(
    model: nn.Module, shape: Sequence[int], ranks: int, kept: Kept, batch_norm: str = "global", shown: str = "auto"
) -> Choice:
    """The partition of every layer for which a performance model predicts the fastest step.

    Args:
        model: on the meta device.
        shape: of the whole input, (N, C, spatial...).
        ranks: to divide every layer over.
        kept: knows what was chosen before for the same model, shape and machine.

    Raises:
        ValueError: one line, where the model cannot run without data, or no partition divides it.
    """
    graph = trace(model, shape)
    machine = machine_here(ranks, kept)
    key = f"choice {_digest(model, graph, ranks, batch_norm)}"
    if (before := kept.get(key)) is not None:
        return Choice(**json.loads(before))
    found = worthwhile(graph, partitions(ranks, len(shape)), MOST)
    if not found:
        raise ValueError(f"{ranks} ranks: no partition of so many divides an input {tuple(shape)}")
    choice = decide(model, graph, found, machine, _of_one(machine, kept), batch_norm, shown)
    kept.put(key, json.dumps(vars(choice)))
    return choice


def decide(
    model: nn.Module,
    graph: LayerGraph,
    found: Sequence[Partition],
    machine: Machine,
    of_one: Machine,
    batch_norm: str = "global",
    shown: str = "off",
) -> Choice:
    """The best strategy of some partitions, or one process where that is predicted to be no slower.

    Args:
        model: on the meta device.
        found: partitions of all ranks.
        machine: as the ranks share it.
        of_one: as one process has it for itself.

    Raises:
        ValueError: one line, where no layer can run under any partition.
    """
    with imagined_job(found[0].ranks, machine.threads):
        planner = Planner(model, graph, found, machine, batch_norm=batch_norm, shown=shown)
        plan = planner.best()
    alone = _alone(model, graph.input, of_one)
    if alone is not None and alone <= plan.times.total:
        return Choice(ONE, alone, alone)
    return Choice(dict(plan.strategy), plan.times.total, alone)


def _of_one(machine: Machine, kept: Kept) -> Machine:
    """What the ranks share, for one process alone: all cores, and a host that nobody slows down."""
    cores = os.cpu_count() or 1
    operator = machine.host.operator / max(1.0, machine.node.ranks / cores)
    host = replace(machine.host, operator=operator)
    return replace(machine, host=host, measured=Measured(cores, kept), threads=cores)


def _alone(model: nn.Module, shape: Sequence[int], machine: Machine) -> float | None:
    with imagined_job(1, machine.threads):
        try:
            step = record_step(model, mesh_of(Partition.parse(ONE["*"])), shape)
        except (ValueError, RuntimeError):
            return None
    seconds = replay(step, machine).total
    return seconds if math.isfinite(seconds) else None


def _digest(model: nn.Module, graph: LayerGraph, ranks: int, batch_norm: str) -> str:
    """Of all that a choice depends on: the model, its input, the machine, the programs."""
    parts = (str(model), graph, ranks, batch_norm, here().read_text(), VERSION, torch.__version__, MOST)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def main(ranks: str, batch_norm: str, output: str, kind: str, name: str, *arguments: str) -> int:
    """Writes the strategy that is chosen for a script; 2, as the exit code, where one line says why it cannot."""
    try:
        if torch.cuda.is_available():
            raise ValueError(
                "processors are measured, and ranks here run on GPUs; accepted: distconv plan --machine FILE"
            )
        found = program.module(name) if kind == "module" else program.script(name)
        model, shape = first_call(lambda: found.run(arguments))
        choice = choose(model.to("meta"), shape, int(ranks), Kept(kept_here()), batch_norm)
    except (program.NotFound, ValueError) as error:
        print(f"distconv: --partition auto: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    lines = [f"{json.dumps(pattern)} = {json.dumps(partition)}" for pattern, partition in choice.strategy.items()]
    Path(output).write_text("\n".join(["[layers]", *lines, ""]))
    print(f"distconv: --partition auto: {choice}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
