"""Runs a plain script on this rank as `python SCRIPT` would run it alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from distconv import settings
from distconv.job.attempt import prefix
from distconv.job.data import loading
from distconv.job.ending import Ending
from distconv.job.handlers import common_handlers
from distconv.job.launcher import BadInput, Job, check_job, divides_locally
from distconv.job.notices import Notices
from distconv.job.output import direct_output
from distconv.job.signals import interrupts_are_exceptions, questions_end_nothing
from distconv.job.stall_watchdog import slow_collectives_reported
from distconv.job.summary import local_gain, summed_up
from distconv.job.supervisor import Watcher
from distconv.job.surroundings import surroundings
from distconv.model.choosing import NothingChosen, Question, ask, environment_of_settings, on_all_ranks, ranks_here
from distconv.model.parallelize import distributed_script
from distconv.model.strategy import Strategy
from distconv.place import Place
from distconv.place.backends import agreed_backend
from distconv.tensors.gathering.record import record
from distconv.tensors.mesh import make_mesh
from distconv.turns.turning import script_in_turn
from mucudnn import program
from mucudnn.process import print_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from distconv.settings.partition import Partition
    from mucudnn.runtime.session import Session


Within = Callable[[str, "Partition", "DeviceMesh"], contextlib.AbstractContextManager[None]]


def run_script(job: Job, place: Place, watcher: Watcher, within: Within) -> int:
    """Runs the script on this rank; its exit code. A failure is shown by the first rank that fails, and by no other.

    ``within``: the context in which each rank of a mesh keeps within a limit of all memory.
    """
    backend = job.backend or ("mpi" if place.mpi else None)  # None: the ranks choose it when all are connected
    check_job(job, place.size, backend)
    output = direct_output(place.rank, job.print_all_ranks, watcher.stderr)
    ending = Ending(place.rank, output, reads_parts=job.shard_data)
    try:
        interrupts_are_exceptions()
        questions_end_nothing()
        store = _join(backend, place, watcher)
        ending.notices = Notices(store, dist.get_world_size())
        with slow_collectives_reported(store, lambda line: print(f"distconv: {line}", file=output, flush=True)):
            _run_distributed(job, store, within)
    except BaseException as error:
        ending.explain(error)
    ending.leave(mpi=backend == "mpi" or place.mpi)
    return ending.code


def _join(backend: str | None, place: Place, watcher: Watcher) -> Store:
    """Initialises torch.distributed; the ranks' store."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if backend == "mpi" or place.mpi:
        try:
            from distconv import mpi
            from distconv.mpi.work import ask_for_ended
        except ImportError as error:
            raise BadInput(str(error)) from None
        port = watcher.store_port() if place.rank == 0 else None
        store: Store = mpi.init_process_group(
            backend=mpi.BACKEND if backend in (None, "mpi") else backend, store_port=port
        )
        if isinstance(store, TCPStore):
            watcher.joined(store.host, store.port, dist.get_world_size())
            ask_for_ended(Notices(store, dist.get_world_size()).endings)
        return store
    shared, rank, size = next(rendezvous("env://"))
    # When torchrun starts the ranks anew, the addresses of those that have gone are still in its store.
    store = PrefixStore(prefix("attempt"), shared)
    dist.init_process_group(backend or agreed_backend(store, rank, size), store=store, rank=rank, world_size=size)
    watcher.joined(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size)
    return store


def _run_distributed(job: Job, store: Store, within: Within) -> None:
    size = dist.get_world_size()
    if job.partition is None:
        job = _chosen(job)
    assert job.partition is not None
    if size != job.partition.ranks:
        raise BadInput(f"partition {str(job.partition)!r} needs {job.partition.ranks} ranks, but there are {size}")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = make_mesh(job.partition, device_type=device_type)
    with contextlib.ExitStack() as around:
        if divides_locally():
            import mucudnn
            from distconv.job.board import StoreBoard

            session = around.enter_context(mucudnn.patched(board=StoreBoard(store)))
            around.enter_context(local_gain(session, job.summary))
            if job.report is not None and dist.get_rank() == 0:
                around.callback(_write_report, job.report, session)
        around.callback(_report_gathered)
        around.enter_context(summed_up(store, job.partition, job.summary, job.parts))
        around.enter_context(common_handlers(store, dist.get_rank(), size))
        around.enter_context(surroundings(store, show_ranks=job.show_ranks))
        around.enter_context(loading(mesh, shard=job.shard_data, store=settings.value("store")))
        if job.parts is not None:
            around.enter_context(script_in_turn((job.parts, job.memory), ranks=mesh))
        if job.parts is None or settings.value("shard_parameters"):
            around.enter_context(distributed_script(mesh, job.strategy, batch_norm=job.batch_norm))
        if job.fitting is not None:
            around.enter_context(within(job.fitting, job.partition, mesh))
        found = program.module(job.script) if job.module else program.script(job.script)
        found.run(job.arguments)


def _chosen(job: Job) -> Job:
    """The job under the partition that is predicted to be the fastest; the first rank asks for all."""
    size, local = dist.get_world_size(), ranks_here()
    kind, threads = "module" if job.module else "script", torch.get_num_threads()
    question = Question(kind, job.script, size, local, threads, job.arguments, job.batch_norm)
    try:
        answer = on_all_ranks(lambda: ask(question, **environment_of_settings()))
    except NothingChosen as error:
        raise BadInput(f"--partition auto: {error}") from None
    if dist.get_rank() == 0:
        print_line(f"distconv: --partition auto: {answer.sentence}")
    if answer.shard_parameters:
        os.environ[settings.SETTINGS["shard_parameters"].variable] = "on"
    strategy = Strategy.parse(answer.strategy, size)
    job = replace(job, partition=strategy.outer, strategy=None if strategy.is_one_partition else strategy)
    check_job(job, size, None)
    return job


def _write_report(path: str, session: Session) -> None:
    """Writes what mucudnn chose for this rank's local convolutions, whatever became of the script."""
    try:
        session.outcome().write(path)
    except OSError as error:
        print_line(f"distconv: --report {path}: {error.strerror}")


def _report_gathered() -> None:
    line = record.summary()
    if line:
        print_line(f"distconv: {line}")
