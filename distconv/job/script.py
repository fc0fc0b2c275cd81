"""A plain script, run on this rank as `python SCRIPT` would run it alone."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import Store, rendezvous  # type: ignore[attr-defined]

from distconv.job.data import loading
from distconv.job.launcher import BadInput, Job, Place, check, choose_backend, divides_locally
from distconv.partition import make_mesh

ALIKE_SECONDS = 2.0  # within which ranks that fail for the same reason all have failed

_PACKAGES = tuple(str(Path(__file__).resolve().parents[1] / name) + os.sep for name in ("distconv", "mucudnn"))


def run(job: Job, place: Place) -> int:
    """Runs the script on this rank; its exit code. A failure is shown by the first rank that fails, and by no other."""
    backend = choose_backend(job, place)
    check(job, place.size, backend)
    shown = sys.stderr
    _direct_output(place.rank, job.print_all_ranks)
    ending = _Ending(place.rank, shown)
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
        refusal = _refusal(error)
        ending.show(f"distconv: {refusal}\n" if refusal else _traceback(error), whose=not refusal)
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

            around.enter_context(mucudnn.patched(board=StoreBoard(store)))
        around.enter_context(loading(mesh, shard=job.shard_data))
        around.enter_context(distributed_script(mesh, job.strategy, batch_norm=job.batch_norm))
        _execute(job)


def _execute(job: Job) -> None:
    sys.argv = [job.script, *job.arguments]
    if job.module:
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path and os.path.isfile(job.script):
        sys.path[0] = os.path.dirname(os.path.realpath(job.script))
    runpy.run_path(job.script, run_name="__main__")


def _direct_output(rank: int, print_all_ranks: bool) -> None:
    if print_all_ranks:
        sys.stdout = _Prefixed(sys.stdout, f"[{rank}] ")
        sys.stderr = _Prefixed(sys.stderr, f"[{rank}] ")
    elif rank:
        sys.stdout.flush()
        # Also what is printed beneath Python. Errors beneath Python stay: nothing else would tell of a crash.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)


class _Prefixed(io.TextIOBase):
    """Writes whole lines, each after a prefix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._line = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def finish(self) -> None:
        if self._line:
            self.write("\n")


class _Ending:
    """How this rank ends: with which code, and which rank tells why."""

    def __init__(self, rank: int, shown: TextIO) -> None:
        self.code = 0
        self.store: Store | None = None
        self._rank, self._shown = rank, shown

    def show(self, text: str, whose: bool = False) -> None:
        if self.store is None:
            first = self._rank == 0
        else:
            try:
                first = self.store.add("distconv/shown", 1) == 1
            except dist.DistError:
                first = False  # the rank that held the store has ended, and with it the job
        if first:
            sys.stdout.flush()
            note = f"distconv: on rank {self._rank} of {dist.get_world_size()}\n" if whose and self._rank else ""
            self._shown.write(text + note)
            self._shown.flush()

    def leave(self, mpi: bool) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Prefixed):
                stream.finish()
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if not self.code:
            dist.destroy_process_group()
        elif mpi and self.store is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Where all ranks fail alike each ends by itself. One that fails alone ends the others, which wait for it.
            if not self._all_failed(self.store):
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(self.code)
            os._exit(self.code)  # without MPI_Finalize, which waits for messages that will not come

    def _all_failed(self, store: Store) -> bool:
        deadline = time.monotonic() + ALIKE_SECONDS
        try:
            failed = store.add("distconv/failed", 1)
            while failed < dist.get_world_size():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
                failed = store.add("distconv/failed", 0)
            if self._rank == 0:
                time.sleep(0.2)  # the store is here
        except dist.DistError:
            return True
        return True


def _refusal(error: BaseException) -> str | None:
    """One line for an error that distconv itself raised about the script's data or network; None for any other."""
    if not isinstance(error, ValueError | NotImplementedError):
        return None
    frames = list(_frames(error.__traceback__))
    if not frames or not frames[-1][0].startswith(_PACKAGES):
        return None
    places = [(name, line) for name, line in frames if not name.startswith(_PACKAGES) and "/torch/" not in name]
    text = " ".join(str(error).split())
    return f"{os.path.relpath(places[-1][0])}:{places[-1][1]}: {text}" if places else text


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<frozen"):
            yield name, trace.tb_lineno
        trace = trace.tb_next


def _traceback(error: BaseException) -> str:
    """As python prints it: from the script's first line on."""
    trace = error.__traceback__
    while trace is not None and _starts(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _starts(name: str) -> bool:
    return name == __file__ or name.startswith("<frozen runpy") or name == getattr(runpy, "__file__", None)
