"""Chooses, once, the partition of every layer of a model for a number of ranks on this machine.

`distconv.model.choosing` starts this as a separate process, and reads what it has written:

    python -m distconv.model.choosing QUESTION ANSWER.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distconv import settings
from distconv.model.automatic import read_question
from distconv.model.choosing import NothingChosen, Question, first_line
from distconv.performance.candidates import partitions, worthwhile
from distconv.performance.choice import PartitionPlanner, StepPlan
from distconv.performance.costs import update_seconds
from distconv.performance.first_call import ModelCall, first_call
from distconv.performance.kept import Kept, kept_here
from distconv.performance.kernels import Measured, measured_for
from distconv.performance.layers import LayerGraph, trace
from distconv.performance.machine import HERE, Machine, MachineError, here, machine_toml, read_machine
from distconv.performance.recording import record_step
from distconv.performance.recordings import Recordings
from distconv.performance.replay import replay
from distconv.performance.without_data import imagined_job, mesh_of
from distconv.settings.partition import Partition
from mucudnn import program
from mucudnn.optimizer import DoesNotFit
from mucudnn.timing import progress
from mucudnn.version import VERSION

MOST = 12
"""Partitions that are looked at: each layer's kernels are measured under all of them."""

ADAM = 2.0
"""Numbers that the optimizer is taken to keep for each parameter."""

ONE = {"*": "sample=1"}
"""The strategy of one process."""


@dataclass(frozen=True)
class PartitionChoice:
    """A choice.

    Attributes:
        strategy: {pattern of layer names: partition}, as `distconv.model.strategy` reads it; `ONE`, of one rank, where
            one process is the fastest.
        seconds: of a step, as predicted.
        alone: those of a step in one process; None where a step cannot be recorded so.
        trains: whether a step has a backward pass.
        doubted: whether it gains more than so many ranks can, after one process was measured again.
        shard_parameters: whether parameters are sharded along all axes.
    """

    strategy: Mapping[str, str]
    seconds: float
    alone: float | None
    trains: bool = True
    doubted: bool = False
    shard_parameters: bool = False

    def __str__(self) -> str:
        predicted = f"predicted {1e3 * self.seconds:.1f} ms a {'step' if self.trains else 'call'}"
        if self.strategy == ONE:
            return f"one process; {predicted}"
        chosen = ", ".join(f"{pattern}: {partition}" for pattern, partition in self.strategy.items())
        chosen += ", with --shard-parameters" * self.shard_parameters
        text = f"{chosen.removeprefix('*: ')}; {predicted}"
        if self.alone is not None:
            text += f", one process {1e3 * self.alone:.1f} ms"
        return f"{text}; more than these ranks can gain, so the machine was busy; not kept" if self.doubted else text


def machine_here(ranks: int, kept: Kept) -> Machine:
    """The machine that `distconv calibrate` has measured; kernels are measured when they are first needed.

    ``ranks``: of the job, which share this machine's cores.

    Raises:
        MachineError: one line, where the machine has not been measured.
    """
    machine = read_machine(HERE)
    return _measuring(machine, measured_for(min(ranks, machine.node.ranks), kept))


def _measuring(machine: Machine, measured: Measured) -> Machine:
    return replace(machine, measured=measured, threads=measured.threads)


def machine_for(question: Question, kept: Kept) -> Machine:
    """This machine as so many of its ranks share it; measured now, where that has not been done.

    Raises:
        MachineError: one line, for ranks on several machines that have not been measured.
        ValueError: where measuring failed; the process that measured has printed why.
    """
    ranks = question.local_ranks
    own = here().with_name(f"machine-{ranks}.toml")
    for path in (here(), own):
        if path.is_file() and (machine := read_machine(str(path))).node.ranks == ranks:
            if machine.doubt:
                _say(f"{path} was {machine.doubt}; run python -m distconv calibrate again")
            return _measuring(machine, Measured(question.threads, kept, ranks))
    if question.ranks != ranks:
        raise MachineError(
            f"{question.ranks} ranks, {ranks} of them on this machine: messages between the machines have not been"
            f" measured; run python -m distconv calibrate with the launcher of the job"
        )
    path = own if here().is_file() else here()
    _say(f"measuring this machine with {ranks} ranks, once")
    command = [sys.executable, "-m", "distconv", "calibrate", "--nproc", str(ranks), "-o", str(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with progress.bar(None, "measuring this machine"):
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise ValueError("this machine could not be measured")
    return _measuring(read_machine(str(path)), Measured(question.threads, kept, ranks))


def _say(what: str) -> None:
    print(f"distconv: --partition auto: {what}", file=sys.stderr, flush=True)


def choose_partitions(call: ModelCall, question: Question, kept: Kept) -> PartitionChoice:
    """The partition of every layer for which a performance model predicts the fastest step.

    Args:
        call: of a model on the meta device.
        question: for what; every layer is divided over its ranks.
        kept: knows what was chosen before for the same model, shape and machine.

    Raises:
        ValueError: one line, where the model cannot run without data, or no partition divides it.
    """
    graph, ranks = trace(call.model, *call.shapes), question.ranks
    machine = machine_for(question, kept)
    key = f"choice {_digest(call, graph, question, machine)}"
    if (before := kept.get(key)) is not None:
        return PartitionChoice(**json.loads(before))
    found = worthwhile(graph, partitions(ranks, len(graph.input)), MOST)
    if not found:
        raise ValueError(f"{ranks} ranks: no partition of so many divides an input {graph.input}")
    of_one = _of_one(machine, kept)
    _say(f"planning {len(graph.layers)} layers under {len(found)} partitions")
    choice = decide(call, graph, found, machine, of_one, question.batch_norm, "auto", question.may_be_one)
    if not choice.doubted:
        kept.put(key, json.dumps(vars(choice)))
    return choice


def decide(
    call: ModelCall,
    graph: LayerGraph,
    found: Sequence[Partition],
    machine: Machine,
    of_one: Machine,
    batch_norm: str = "global",
    shown: str = "off",
    may_be_one: bool = True,
) -> PartitionChoice:
    """The best strategy of some partitions, or one process where that may be and is predicted to be no slower.

    Parameters are sharded along all axes where the program asks for it, and where Adam's states fit no rank otherwise.
    One process that takes more than `ranks` times as long was measured while something else ran, and is measured again.

    Args:
        call: of a model on the meta device.
        found: partitions of all ranks.
        machine: as the ranks share it.
        of_one: as one process has it for itself.

    Raises:
        ValueError: one line, where no layer can run under any partition.
    """
    ranks, memory = found[0].ranks, machine.device.memory

    def planning() -> PartitionPlanner:
        recordings = Recordings(call.model, graph, batch_norm, call.trains)
        given: Any = {"states": ADAM * call.trains, "shown": shown, "recordings": recordings}
        return PartitionPlanner(call.model, graph, found, machine, **given)

    def fitting(planner: PartitionPlanner) -> StepPlan | None:
        with contextlib.suppress(DoesNotFit), progress.bar(None, "whole steps", shown):
            return planner.best(memory)
        return None

    with imagined_job(ranks, machine.threads):
        planner, fully = planning(), bool(settings.value("shard_parameters"))
        plan = fitting(planner)
        if plan is None and not fully and planner.fits_in_shares(memory):
            with settings.options({"shard_parameters": "on"}):
                plan = fitting(planning())
            fully = plan is not None
        plan = plan or planner.best()
    for partition, why in planner.recordings.faults.items():
        _say(f"{partition} is left out: {why}")
    seconds = plan.seconds
    with progress.bar(None, "one process", shown):
        alone = _alone(call, of_one)
        if alone is not None and alone > ranks * seconds and isinstance(of_one.measured, Measured):
            of_one.measured.doubt()
            alone = _alone(call, of_one)
    if may_be_one and alone is not None and alone <= seconds:
        return PartitionChoice(ONE, alone, alone, call.trains)
    doubted = alone is not None and alone > ranks * seconds
    return PartitionChoice(dict(plan.strategy), seconds, alone, call.trains, doubted, fully)


def _of_one(machine: Machine, kept: Kept) -> Machine:
    """The machine for a single process: with all cores, and a host that no other rank slows down."""
    cores = os.cpu_count() or 1
    operator = machine.host.operator / max(1.0, machine.node.ranks / cores)
    host = replace(machine.host, operator=operator)
    return replace(machine, host=host, measured=Measured(cores, kept), threads=cores)


def _alone(call: ModelCall, machine: Machine) -> float | None:
    with imagined_job(1, machine.threads):
        try:
            step = record_step(call.model, mesh_of(Partition.parse(ONE["*"])), *call.shapes, trains=call.trains)
            seconds = replay(step, machine).total
            if not call.trains:
                return seconds
            # The memory that this machine's ranks share is its own then.
            device = replace(machine.device, bandwidth=machine.node.ranks * machine.device.bandwidth)
            return seconds + update_seconds(step, replace(machine, device=device), ADAM)
        except (ValueError, RuntimeError):
            return None


def _digest(call: ModelCall, graph: LayerGraph, question: Question, machine: Machine) -> str:
    """A digest of all that a choice depends on: the model, its input, the ranks, the machine, the programs."""
    ranks = (question.ranks, question.local_ranks, question.threads, question.may_be_one)
    options = [settings.value(name) for name in ("channel_algorithm", "shard_parameters")]
    rest = (question.batch_norm, options, VERSION, torch.__version__, MOST)
    parts = (str(call.model), call.trains, graph, ranks, machine_toml(machine), rest)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def answer_question(question: Question, kept: Kept) -> PartitionChoice:
    """The choice for a question.

    Raises:
        program.NotFound, ValueError: one line, where nothing can be chosen.
    """
    if torch.cuda.is_available():
        raise ValueError("processors are measured, and ranks here run on GPUs; accepted: distconv plan --machine FILE")
    if question.kind == "model":
        call = ModelCall(*read_question(question.name), trains=True)
    else:
        found = program.module(question.name) if question.kind == "module" else program.script(question.name)
        _say(f"running {question.name} up to its first call of a model")
        call = first_call(lambda: found.run(question.arguments))
    return choose_partitions(replace(call, model=call.model.to("meta")), question, kept)


def main(question: str, output: str) -> int:
    """Answers a question, or says in one line why it cannot; both as JSON."""
    asked = json.loads(question)
    try:
        choice = answer_question(Question(**{**asked, "arguments": tuple(asked["arguments"])}), Kept(kept_here()))
        sharded = choice.shard_parameters
        found: dict[str, Any] = dict(strategy=dict(choice.strategy), sentence=str(choice), shard_parameters=sharded)
    except (program.NotFound, NothingChosen, ValueError) as error:
        found = {"refusal": " ".join(str(error).split())}
    except Exception as error:  # a fault of the performance model, which must not cost the user more than a line
        line = traceback.extract_tb(error.__traceback__)[-1]
        found = {"refusal": f"{first_line(error)} ({os.path.basename(line.filename)}:{line.lineno})"}
    Path(output).write_text(json.dumps(found))
    return 0
