"""Processes that watch the ones they have started, to see how these end and to leave nothing behind."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from distconv import settings
from distconv.files.job_folder import remove_folders_of
from distconv.job.link import MachineLink
from distconv.job.notices import Notices, shell_code
from distconv.job.processes import ForkedChild, Process, adopt_orphans, end_descendants, end_with
from distconv.job.signals import Signals, endings_are_exits, endings_are_ignored
from distconv.job.watch import STOP_SECONDS, Watch
from distconv.place import Place
from distconv.place.addresses import LOOPBACK, is_on_one_machine, listening_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LINGER_SECONDS = 8.0  # what a supervisor waits for the other ranks after its own failed

_POLL_SECONDS = 0.05
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: "True" where the ranks' store is in none of them


class Watcher:
    """A rank's connection to the process that watches it.

    stderr: where to put what a rank that is not shown writes to stderr beneath Python.
    """

    def __init__(self, stderr: int | None = None, line: socket.socket | None = None) -> None:
        self.stderr, self._line = stderr, line

    def store_port(self) -> int:
        """The port of the store of the watcher of rank 0 under MPI."""
        assert self._line is not None
        return int(self._line.makefile().readline())

    def joined(self, host: str, port: int, size: int) -> None:
        """Reports that all ranks are connected, and the address of their store."""
        if self._line is not None:
            self._line.sendall(f"{host} {port} {size}\n".encode())


class _Joining:
    """The store at which a supervisor finds the notices: the one that its rank names, or its own.

    connected: called with the store's host and port, once, when they are known.
    """

    def __init__(self, line: socket.socket, connected: Callable[[str, int], None]) -> None:
        self.store: TCPStore | None = None
        self._line, self._connected = line, connected
        self._notices: Notices | None = None
        self._line.setblocking(False)

    def listen(self, host: str, port: int) -> None:
        self.store = listening_store(host, port)
        with contextlib.suppress(BrokenPipeError):  # the rank has ended already, which `Watch` reports
            self._line.sendall(f"{self.store.port}\n".encode())

    def notices(self) -> Notices | None:
        if self._notices is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            with contextlib.suppress(OSError):  # nothing to read yet, or never again
                words = self._line.recv(1024).decode().split()
                if words:
                    host, port, size = words
                    store = self.store or TCPStore(host, int(port), is_master=False, wait_for_workers=False)
                    self._notices = Notices(store, int(size))
                    self._connected(host, int(port))
        return self._notices


def supervise_rank(place: Place, captures: bool) -> int | Watcher:
    """Parts this process, a rank that mpiexec or torchrun started, in two.

    The child goes on as the rank and gets a Watcher. The parent stays beside it: it sees how the rank ends, which a
    rank cannot report that was killed, and ends it when another rank fails. It gets the rank's exit code.
    captures: whether what the rank writes to stderr beneath Python is captured.
    """
    rank, mpi = place.rank, place.mpi
    captured: IO[bytes] | None = tempfile.TemporaryFile() if captures else None  # noqa: SIM115 (as long as the process)
    ours, theirs = socket.socketpair()
    parent, hosts = os.getpid(), rank == 0 and (mpi or os.environ.get(_AGENT_STORE) != "True")
    child = _fork()
    if child is None:
        end_with(parent)
        ours.close()
        if not mpi:
            os.environ[_AGENT_STORE] = "True"
        return Watcher(captured.fileno() if captured else None, theirs)
    theirs.close()  # all else stays open: mpiexec kills every rank at once when it sees a rank's connection closed
    links: list[MachineLink] = []

    def connected(host: str, port: int) -> None:
        if not is_on_one_machine():
            links.append(_link(host, port, place, watch, child.pid))

    joining = _Joining(ours, connected)
    watch = Watch({rank: child}, place.size, joining.notices, {rank: captured} if captured else {})
    endings_are_exits()  # the launcher may end this process while it takes leave of the other ranks
    try:
        if hosts and (refused := _host(joining, mpi)):
            child.send_signal(signal.SIGKILL)
            print(f"distconv: {refused}", file=sys.stderr)
            return 2
        adopt_orphans()
        code = watch.run()
        for link in links:
            link.close()
        if (notices := joining.notices()) is not None:
            linger = LINGER_SECONDS if code else math.inf
            parting = _Parting(notices, rank, 0.0 if watch.lost is not None else linger)
            if mpi:
                code = parting.under_mpi(shell_code(watch.failed[1]) if watch.failed else code, child.pid)
            elif joining.store is not None:
                parting.of_the_host()
            else:
                notices.leave(rank)
    finally:
        endings_are_ignored()
        child.kill()  # it still runs where this process was asked to end before it watched the rank
        remove_folders_of(child.pid)
    if mpi and joining.notices() is None and watch.failed is not None and watch.failed[1] < 0:
        # Not all ranks are connected. mpiexec may not know this one yet, and would let the others wait for it; that a
        # process is killed it notices always.
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def _link(host: str, port: int, place: Place, watch: Watch, process: int) -> MachineLink:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    first = place.local_rank == 0

    def cut_off(line: str) -> None:
        watch.end_at_once(line if first else None)
        remove_folders_of(process)
        os._exit(1)

    return MachineLink(
        lambda: TCPStore(host, port, is_master=False, wait_for_workers=False),
        place.rank,
        first,
        settings.value("lost_after"),
        silent=watch.lose,
        cut_off=cut_off,
    )


def _host(joining: _Joining, mpi: bool) -> str | None:
    """Makes the ranks' store; why not, where that fails."""
    if mpi:  # ranks of other machines ask for this one by its name
        host, port = LOOPBACK if is_on_one_machine() else socket.gethostname(), 0
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        joining.listen(host, port)
    except (RuntimeError, OSError) as error:  # torch's errors of a network are RuntimeErrors
        return f"the ranks' store cannot listen at {host}:{port}: {error}"
    return None


class _Parting:
    """How supervisors leave one another; none waits longer than `seconds`, nor after its parent has ended."""

    def __init__(self, notices: Notices, rank: int, seconds: float) -> None:
        self._notices, self._rank = notices, rank
        self._deadline, self._parent = time.monotonic() + seconds, os.getppid()

    def of_the_host(self) -> None:
        """Keeps the store until no other rank needs it."""
        self._notices.leave(self._rank)
        self._wait(self._notices.all_left)

    def under_mpi(self, code: int, process: int) -> int:
        """Waits for all ranks to end; the exit code of the job, as mpiexec takes that of whichever ends first.

        When mpiexec sees a process end that failed, it kills all others, also one that is to say why. So all go at
        the same time, after the first one has removed the job's folder, which its rank, `process`, has made.
        """
        self._wait(lambda: len(self._notices.endings()) == self._notices.size)
        code = code or next((shell_code(ended) for ended in self._notices.endings().values() if ended), 0)
        if self._rank == 0:
            remove_folders_of(process)
            self._notices.sweep()
            self.of_the_host()
        else:
            self._wait(self._notices.swept)
            self._notices.leave(self._rank)
        return code

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition() and time.monotonic() < self._deadline and os.getppid() == self._parent:
            time.sleep(_POLL_SECONDS)


def supervise_launcher() -> int | None:
    """Parts this process, the launcher, in two, so that whichever of them is killed, the other ends every rank.

    The child goes on as the launcher and gets None; the parent gets its exit code.
    """
    child = _fork()
    if child is None:
        adopt_orphans()
        return None
    return accompany(child, bound=False)


def accompany(process: Process, bound: bool) -> int:
    """Waits for a process that watches ranks itself, and passes signals on to it; its exit code.

    bound: whether it is ended when the process that started this one has ended.
    """
    adopt_orphans()
    parent, asked, kill_at = os.getppid(), set[int](), math.inf
    with Signals() as signals:
        while (code := process.poll()) is None:
            for number in signals.taken():
                asked.add(number)
                process.send_signal(number)
            if bound and os.getppid() != parent and kill_at == math.inf:
                process.send_signal(signal.SIGTERM)
                kill_at = time.monotonic() + STOP_SECONDS
            if time.monotonic() > kill_at:
                process.send_signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        if code:
            end_descendants()
        if code < 0 and -code not in asked:
            print(f"distconv: the launcher was killed (signal {-code})", file=sys.stderr)
    return shell_code(code)


def part_into_ranks(places: Sequence[Mapping[str, str]], print_all: bool, listener: socket.socket) -> int | Watcher:
    """Parts this process in one rank for each of `places` and the launcher that watches them.

    What this process has imported the ranks need not import: they share it, as long as none of them writes to it.

    places: each rank's own environment, beside that of all. listener: of the ranks' store, bound and
    listening already. Its store is made after the ranks, since it has a thread, which a rank would lack.
    Returns the exit code of the job in the launcher, a Watcher in a rank.
    """
    launcher = os.getpid()
    adopt_orphans()
    written: dict[int, IO[bytes]] = {}
    processes: dict[int, Process] = {}
    for rank, place in enumerate(places):
        if rank and not print_all:
            written[rank] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        child = _fork()
        if child is None:
            end_with(launcher)
            listener.close()
            os.environ.update(place)
            if rank:
                _leave_input()
            return Watcher(os.dup(written[rank].fileno()) if rank in written else None)
        processes[rank] = child

    @functools.cache
    def notices() -> Notices:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = listener.getsockname()
        # The store takes the socket over and listens on it.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return Notices(store, len(places))

    return Watch(processes, len(places), notices, written).run()


def _leave_input() -> None:
    """Lets this process read nothing: what is typed, or arrives through a pipe, is for the first rank."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _fork() -> ForkedChild | None:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    return ForkedChild(pid) if pid else None
