"""Notices when the machines of a job no longer reach each other: a broken network reports nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distconv.job.attempt import prefix

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

BEAT_SECONDS = 0.5

_NO_MORE = b"ended"


class Beats:
    """Heartbeats: machines write to the job's store that they are there, so that a silent one is noticed.

    A machine is known by a rank of its own. What is compared are counts, so that clocks need not agree.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._at = prefix("link")
        self._count = 0
        self._machine: int | None = None
        self._heard: dict[int, tuple[bytes, float]] = {}

    def join(self, rank: int) -> None:
        """Makes this machine known."""
        self._machine = self._store.add(f"{self._at}/machines", 1) - 1
        self._store.set(f"{self._at}/{self._machine}/count", "0")
        self._store.set(f"{self._at}/{self._machine}/name", f"{rank} {socket.gethostname()}")

    def beat(self) -> None:
        """Counts on, if this machine has joined; returns when the store has answered."""
        self._count += 1
        if self._machine is not None:
            self._store.set(f"{self._at}/{self._machine}/count", str(self._count))
        self._store.add(f"{self._at}/machines", 0)  # setting a key waits for no answer

    def end(self) -> None:
        """Notes that this machine will not count on: it has ended as it should."""
        if self._machine is not None:
            self._store.set(f"{self._at}/{self._machine}/count", _NO_MORE.decode())

    def silent(self, now: float) -> tuple[int, str] | None:
        """A rank and the name of a machine that has not been heard of for `seconds`; `now`: of time.monotonic()."""
        for machine in range(self._store.add(f"{self._at}/machines", 0)):
            name = f"{self._at}/{machine}/name"
            if not self._store.check([name]):
                continue  # it is joining
            count = bytes(self._store.get(f"{self._at}/{machine}/count"))
            if machine not in self._heard or self._heard[machine][0] != count:
                self._heard[machine] = count, now
            elif count != _NO_MORE and now - self._heard[machine][1] > self._seconds:
                rank, host = self._store.get(name).decode().split()
                return int(rank), host
        return None


class MachineLink:
    """Watches, in threads, whether other machines are heard and whether the store answers.

    connect: makes a connection to the store for the threads alone, as their calls may block for long.
    rank: of this process; the first rank of a machine (`first`) represents it.
    silent: called where another machine has fallen silent, on rank 0 alone, with one of its ranks and a line.
    cut_off: called where the store does not answer, with a line. Other calls of the store may be waiting then.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        first: bool,
        seconds: float,
        silent: Callable[[int, str], None],
        cut_off: Callable[[str], None],
    ) -> None:
        self._connect, self._rank, self._first, self._seconds = connect, rank, first, seconds
        self._silent, self._cut_off = silent, cut_off
        self._closed = threading.Event()
        self._answers = 0
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        threading.Thread(target=self._guard, daemon=True).start()

    def close(self) -> None:
        """Ends the watching; other machines read that this one has no more to say."""
        self._closed.set()
        self._beating.join(2 * BEAT_SECONDS)  # it may be waiting for a store that is gone

    def _beat(self) -> None:
        from torch.distributed import DistError

        # A store that has ended answers at once: the job has ended, or will get a notice of it.
        with contextlib.suppress(DistError):
            beats = Beats(self._connect(), self._seconds)
            if self._first:
                beats.join(self._rank)
            while not self._closed.wait(BEAT_SECONDS):
                beats.beat()
                self._answers += 1
                if self._rank == 0 and (found := beats.silent(time.monotonic())):
                    self._silent(found[0], f"{found[1]}, with rank {found[0]}, has not been heard of for {self._for()}")
                    break
            beats.end()
        self._closed.set()

    def _guard(self) -> None:
        answers, since = self._answers, time.monotonic()
        missed = 0
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if answers != self._answers:
                answers, since, missed = self._answers, now, 0
            elif now - since > self._seconds:
                missed += 1
            # Not the first time: this process itself may have been stopped. The machine's first rank comes before the
            # others, since it reports, and a launcher that sees one end may end it.
            if missed > (1 if self._first else 2):
                self._cut_off(f"rank 0's machine has not answered {socket.gethostname()} for {self._for()}")
                return

    def _for(self) -> str:
        return f"{self._seconds:g} s"
