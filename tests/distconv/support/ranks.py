"""A pool of real processes, started once, in which a test runs a function on every rank.

Ranks are forked from a process that has imported torch and distconv. Over MPI each takes the place of a process that
mpiexec has started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

IMPORTS = "tests.distconv.support.rank_imports"
PLACE = Path(__file__).with_name("mpi_place.py")
STARTUP_SECONDS = 120.0
GRACE_SECONDS = 5.0  # what other ranks get to finish, or to fail alike, after the first failure


def missing_for_mpi() -> str | None:
    """Why there can be no ranks over "mpi"."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpiexec") is None and not Path(sys.executable).with_name("mpiexec").exists():
        return "there is no mpiexec"
    return None


class RankDied(RuntimeError):
    """A rank of the pool ended, or did not answer in time; the pool was killed."""


class Forked:
    """A rank, asked as a process of `subprocess` is."""

    def __init__(self, *arguments: str) -> None:
        self._process = forking().Process(target=_serve_apart, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float | None = None) -> None:
        self._process.join(seconds)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a rank", seconds or 0.0)


@functools.cache
def forking() -> ForkServerContext:
    """What forks processes from one that has imported what ranks need, with the environment of this one."""
    (context := multiprocessing.get_context("forkserver")).set_forkserver_preload([IMPORTS])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _path()
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Ranks:
    """`size` processes with torch.distributed initialised over `backend` ("gloo" or "mpi"), one thread each.

    Processes start at the first `run` and stay. A run in which a rank dies, hangs beyond `timeout` seconds, or fails
    while others succeed leaves communication in an unknown state: it ends the processes; the next run starts anew.
    """

    def __init__(self, size: int, backend: str, timeout: float = 240.0) -> None:
        self.size, self.backend, self.timeout = size, backend, timeout
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of function(*args, **kwargs) on every rank, in rank order.

        `function` is defined at the top of a module; arguments and results are picklable. Before it runs, each rank
        seeds torch with 0, sets the default dtype to float32, and leaves small results of scripts distributed. An
        exception is raised here as it was there, with a note that tells the rank and shows its traceback.
        """
        if not self._connections:
            self._start()
        task = pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))
        for connection in self._connections:
            connection.send_bytes(task)
        answers: dict[int, tuple[bool, Any]] = {}
        failed: int | None = None
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.size:
            waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failed is not None:
                    break
                self.close()
                missing, name = ", ".join(map(str, waiting.values())), getattr(function, "__name__", function)
                raise RankDied(f"{name}: no answer within {self.timeout:g} s from {self.backend} rank(s) {missing}")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    died = RankDied(f"{self.backend} rank {rank} died{self._last_words(rank)}")
                    self.close()
                    # What another rank has raised before is that it lost its connection to this one.
                    raise died from (None if failed is None else answers[failed][1])
                if not answers[rank][0] and failed is None:
                    failed = rank
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed is not None:
            if len(answers) < self.size or any(succeeded for succeeded, _ in answers.values()):
                self.close()
            raise answers[failed][1]
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._connections, self._directory = [], [], None

    def _last_words(self, rank: int) -> str:
        """How a rank ended and, after a fatal signal, where each of its threads was."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(GRACE_SECONDS)
        where = Path(self._directory.name, f"fault-{rank}").read_text(errors="replace")  # type: ignore[union-attr]
        return f" with exit code {self._processes[rank].returncode}; see its output\n{where}"

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        address = os.path.join(self._directory.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.5)
            try:
                self._processes = list(self._started(address))
                self._connections = self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _started(self, address: str) -> Iterator[subprocess.Popen[bytes] | Forked]:
        folder = os.path.dirname(address)
        for rank in range(self.size):
            yield Forked(address, self.backend, folder, str(rank), str(self.size))
        if self.backend == "mpi":
            from distconv.job.launcher import mpiexec

            command = [*mpiexec(self.size), sys.executable, "-IS", str(PLACE), folder]
            environment = dict(os.environ, PYTHONPATH=_path())
            yield subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _accept(self, listener: socket.socket) -> list[Connection]:
        by_rank: dict[int, Connection] = {}
        deadline = time.monotonic() + STARTUP_SECONDS
        while len(by_rank) < self.size:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                codes = [process.returncode for process in self._processes if process.poll() is not None]
                if codes or time.monotonic() > deadline:
                    raise RankDied(f"{self.size} {self.backend} ranks did not start; exit codes {codes}") from None
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            by_rank[pickle.loads(connection.recv_bytes())] = connection
        return [by_rank[rank] for rank in range(self.size)]


def _path() -> str:
    """The repository before what the caller's own PYTHONPATH names, which may be where torch is found."""
    return os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH"))))


def _answer(task: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    from distconv.model import running

    largest = running.LARGEST_PLAIN  # a module of tests that a later task imports reads it, too
    try:
        path, call = pickle.loads(task)
        sys.path[:] = path
        function, args, kwargs = pickle.loads(call)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        running.LARGEST_PLAIN = -1  # the results of tests are small, and are to meet the rules
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:
        text = f"on rank {dist.get_rank()} of {dist.get_world_size()}:\n{traceback.format_exc()}"
        error.__traceback__ = error.__cause__ = error.__context__ = None
        try:
            error.add_note(text)
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
        except Exception:
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__} {text}")))
        return answer
    finally:
        running.LARGEST_PLAIN = largest


def _serve_apart(*arguments: str) -> None:
    """What a forked rank does, in a session of its own."""
    os.setsid()
    # Otherwise workers of a DataLoader would come from the server and import much anew; those of a script are forked.
    multiprocessing.set_start_method("fork", force=True)
    _serve(*arguments)


@contextlib.contextmanager
def _place_under_mpiexec(address: str) -> Iterator[None]:
    """A context in which this process has the environment of the one that mpiexec has started for it, and that one's
    connection to mpiexec. What mpiexec has started ends with this process."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(1)
        place, _ = listener.accept()
    with place:
        process, connections, _, _ = socket.recv_fds(place, 64, 1)
        told = Path(f"/proc/{int(process)}/environ").read_bytes().decode(errors="surrogateescape")
        os.environ.update(entry.split("=", 1) for entry in told.split("\0") if entry)
        for connection in connections:
            os.environ["PMI_FD"] = str(connection)
        # What mpiexec ends, as after an abort, is the process at that place: this one ends with it.
        threading.Thread(target=lambda: place.recv(1) or os.kill(os.getpid(), signal.SIGKILL), daemon=True).start()
        yield


def _serve(address: str, backend: str, folder: str, rank: str, size: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.distconv.support.gloo_device import share_a_device

    faulthandler.enable(Path(folder, f"fault-{rank}").open("w"))  # noqa: SIM115
    torch.set_num_threads(1)
    with _place_under_mpiexec(f"{folder}/{rank}") if backend == "mpi" else contextlib.nullcontext():
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if backend == "mpi":
            from distconv.mpi import init_process_group

            init_process_group()
        else:
            share_a_device()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size))
        _answer_all(address)


def _answer_all(address: str) -> None:
    """Runs what the test process asks for, until that leaves."""
    import torch.distributed as dist

    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(address)
        connection = Connection(connecting.detach())
    connection.send_bytes(pickle.dumps(dist.get_rank()))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))
    sys.stdout.flush()
    os._exit(0)  # the test process has left: no handshake with other ranks, which may have gone
