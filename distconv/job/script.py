"""A plain script, run on this rank as `python SCRIPT` would run it alone."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import Store, rendezvous  # type: ignore[attr-defined]

from distconv.job.data import loading
from distconv.job.ending import Ending, as_python_prints, refusal_of
from distconv.job.launcher import BadInput, Job, check, choose_backend, divides_locally
from distconv.job.output import direct_output
from distconv.job.place import Place
from distconv.job.surroundings import surroundings
from distconv.partition import make_mesh
from mucudnn import program

if TYPE_CHECKING:
    from mucudnn.runtime.session import Session


def run(job: Job, place: Place) -> int:
    """Runs the script on this rank; its exit code. A failure is shown by the first rank that fails, and by no other."""
    backend = choose_backend(job, place)
    check(job, place.size, backend)
    shown = sys.stderr
    direct_output(place.rank, job.print_all_ranks)
    ending = Ending(place.rank, shown)
    try:
        ending.store = _join(backend, place)
        _run_distributed(job, ending.store)
    except BadInput as error:
        ending.show(f"distconv: {error}\n")
        ending.code = 2
    except SystemExit as request:
        ending.code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if request.code is not None and not isinstance(request.code, int):
            ending.show(f"{request.code}\n")
    except KeyboardInterrupt:
        ending.code = 130
    except BaseException as error:
        refusal = refusal_of(error)
        ending.show(f"distconv: {refusal}\n" if refusal else as_python_prints(error), whose=not refusal)
        ending.code = 2 if refusal else 1
    ending.leave(mpi=backend == "mpi" or place.mpi)
    return ending.code


def _join(backend: str, place: Place) -> Store:
    """Initialises torch.distributed; the store at which the ranks meet."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if backend == "mpi" or place.mpi:
        try:
            from distconv import mpi
        except ImportError as error:
            raise BadInput(f"ranks started by mpiexec need mpi4py: {error}") from None
        store: Store = mpi.init_process_group(backend=mpi.BACKEND if backend == "mpi" else backend)
        return store
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return store


def _run_distributed(job: Job, store: Store) -> None:
    from distconv.model.parallelize import distributed_script

    size = dist.get_world_size()
    if size != job.partition.ranks:
        raise BadInput(f"partition {str(job.partition)!r} needs {job.partition.ranks} ranks, but there are {size}")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = make_mesh(job.partition, device_type=device_type)
    with contextlib.ExitStack() as around:
        if divides_locally():
            import mucudnn
            from distconv.job.board import StoreBoard

            session = around.enter_context(mucudnn.patched(board=StoreBoard(store)))
            if job.report is not None and dist.get_rank() == 0:
                around.callback(_write_report, job.report, session)
        around.enter_context(surroundings(store, show_ranks=job.show_ranks))
        around.enter_context(loading(mesh, shard=job.shard_data))
        around.enter_context(distributed_script(mesh, job.strategy, batch_norm=job.batch_norm))
        _execute(job)


def _write_report(path: str, session: Session) -> None:
    """Writes what mucudnn chose for this rank's local convolutions, whatever became of the script."""
    from mucudnn.reporting.run_file import Outcome

    try:
        Outcome(session.records(), session.timeline()).write(path)
    except OSError as error:
        print(f"distconv: --report {path}: {error.strerror}", file=sys.stderr)


def _execute(job: Job) -> None:
    try:
        found = program.module(job.script) if job.module else program.script(job.script)
    except program.NotFound as error:
        raise BadInput(str(error)) from None
    found.run(job.arguments)
