"""`python -m distconv run --parts`: runs an unmodified script whose models compute part after part."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distconv import private_names, settings
from distconv.commands.network import one_line
from distconv.job.launcher import BadInput, divides_locally
from distconv.place import Place
from distconv.settings.partition import Partition, read_memory, read_parts
from mucudnn.settings import SETTINGS as MUCUDNN_SETTINGS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from distconv.turns.turning import TurnPlan

_OF_RANKS = (
    *(name for name in settings.SETTINGS if name != "partition"),
    *("strategy", "nproc", "shard_data", "print_all_ranks", "show_ranks", "report"),
)
"""The options that are about several ranks."""

_ACCEPTED = ("random", "halo", "results")

_NOT_WITHIN_MEMORY = {
    "strategy": "a model runs on one mesh",
    "shard_data": "inputs are whole",
    "store": "inputs are whole",
}
"""The options of a job that do not go with a limit of all of each rank's memory, and why."""

_NOT_IN_A_JOB = {
    "strategy": "all layers have the same parts",
    "channel_algorithm": "parts share parameters",
    "shard_data": "parts are cut from whole inputs",
    "store": "parts are cut from whole inputs",
}
"""The options of a job that do not go with parts on several ranks, and why."""


def settle_parts(options: argparse.Namespace) -> None:
    """Makes ``--parts auto`` what chooses parts: ``--memory`` alone, of what the device has free if none is named."""
    if options.parts == settings.AUTO:
        options.parts, options.memory = None, options.memory or settings.AUTO


def parts_of_job(options: argparse.Namespace, ranks: Partition | None) -> tuple[Partition | None, int | None]:
    """The parts that each of some ranks computes in turn, and the limit of their memory; None for ranks alone.

    Raises:
        BadInput: one line, where parts are not accepted, or go with something else that is not.
    """
    if settings.value("results") == "host":
        raise BadInput("--results host on ranks, where all ranks have all results; accepted: --parts in one process")
    if options.parts is None:
        if options.memory is not None:
            _check_fitting(options, ranks)
        return None, None
    ranks_with_parts(ranks)
    for name, why in _NOT_IN_A_JOB.items():
        if getattr(options, name):
            raise BadInput(f"--parts and --partition with {settings.flag(name)}: {why}; accepted: without it")
    if options.batch_norm != "global":
        raise BadInput(BATCH_NORM)
    with one_line("--parts with --partition"):
        return read_parts(options.parts), read_memory(options.memory)


def _check_fitting(options: argparse.Namespace, ranks: Partition | None) -> None:
    """BadInput, one line, where each rank cannot keep within a limit of all memory."""
    _check_one_limit(options)
    if ranks is None:
        raise BadInput("--memory with --partition auto, which chooses without a limit; accepted: axis=ranks,...")
    for name, why in _NOT_WITHIN_MEMORY.items():
        if getattr(options, name) or (name in settings.SETTINGS and settings.value(name)):
            raise BadInput(f"--memory and --partition with {settings.flag(name)}: {why}; accepted: without it")
    if options.batch_norm != "global":
        raise BadInput("--memory and --partition with --batch-norm local; accepted: global")
    with one_line("--memory with --partition"):
        read_parts(ranks, "partition")
        read_memory(None if options.memory == settings.AUTO else options.memory)


def _check_one_limit(options: argparse.Namespace) -> None:
    """BadInput, one line, where mucudnn has a limit of its own of all memory."""
    variable = MUCUDNN_SETTINGS["memory_limit"].variable
    if options.parts is None and os.environ.get(variable):
        raise BadInput(
            f"--memory with {variable}: --memory counts workspaces, too; accepted: MUCUDNN_WORKSPACE_LIMIT, which may"
            " be unlimited"
        )


def ranks_with_parts(ranks: Partition | str | None) -> Partition:
    """The ranks each of which computes parts in turn. BadInput, one line, where they are not accepted."""
    if ranks is None or ranks == settings.AUTO:
        raise BadInput("--parts with --partition auto; accepted: both named")
    with one_line("--parts with --partition"):
        return read_parts(ranks, "partition")


BATCH_NORM = "--parts with --batch-norm local; accepted: global, statistics over the whole batch"


def plan_of(options: argparse.Namespace) -> TurnPlan:
    """How models compute in one process: in parts, or in what way they fit a limit of all memory; with a partition, as
    the first of its ranks would. BadInput, one line, for what is not accepted."""
    from distconv.fitting.models import Fitting
    from distconv.fitting.ranks import Ranks
    from distconv.turns.turning import read_plan

    try:
        if options.parts is None:
            ranks = None if options.partition is None else Ranks(read_parts(options.partition, "partition"))
            return Fitting(options.memory, ranks), None
        return read_plan(options.parts, options.memory)
    except ValueError as error:
        raise BadInput(f"--parts: {error}" if options.parts else f"--{error}") from None


@contextlib.contextmanager
def ranks_within(memory: str, partition: Partition, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which models keep within a limit of each rank's memory; every rank of the mesh must call it."""
    from distconv.fitting.models import Fitting
    from distconv.fitting.ranks import Ranks
    from distconv.turns.turning import script_in_turn

    with script_in_turn((Fitting(memory, Ranks(partition, mesh)), None), ranks=mesh):
        yield


def run_in_turn(options: argparse.Namespace, place: Place | None) -> int:
    """Runs the script; its exceptions propagate, as from python itself.

    Raises:
        BadInput, NotFound: one line, where something is refused.
    """
    flag = "--memory" if options.parts is None else "--parts"
    if place is not None:
        raise BadInput(
            f"{flag} without --partition is for one process, and {place.size} ranks were started; accepted: without a"
            " launcher, or with --partition"
        )
    for name in _OF_RANKS:
        if name not in _ACCEPTED and getattr(options, name):
            raise BadInput(f"{flag} with {settings.flag(name)}, which is about several ranks; accepted: one of the two")
    if options.batch_norm != "global":
        raise BadInput(BATCH_NORM)
    _check_one_limit(options)
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        os.environ.setdefault("OMP_STACKSIZE", "2M")  # OpenMP's threads for each part would map 8 MiB each
    private_names.require(private_names.IN_TURN)
    from distconv.job.ending import refusal_of
    from distconv.job.one_process import one_process
    from distconv.job.summary import summed_up_in_turn
    from distconv.turns.turning import script_in_turn
    from mucudnn import program

    plan = plan_of(options)
    how = f"memory {options.memory}" if options.parts is None else f"parts {options.parts} in turn"
    found = program.module(options.script) if options.module else program.script(options.script)
    with contextlib.ExitStack() as around:
        around.enter_context(settings.options({name: getattr(options, name) for name in _ACCEPTED}))
        if divides_locally():
            import mucudnn

            around.enter_context(mucudnn.patched())
        around.enter_context(one_process())  # a model does not see the parts as ranks
        around.enter_context(script_in_turn(plan))
        around.enter_context(summed_up_in_turn(how, options.summary))
        try:
            found.run(options.arguments)
        except Exception as error:
            if refusal := refusal_of(error):
                raise BadInput(refusal) from None
            raise
    return 0
