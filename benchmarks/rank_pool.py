"""Ranks that answer requests one at a time, forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 6.0
"""How long the other ranks may take once one has failed: then they wait for it."""


class Hang(RuntimeError):
    """Ranks gave no answer in time, or died; the pool has ended them."""


class Failure:
    """What a request raised on a rank, as text."""

    def __init__(self, text: str) -> None:
        self.text = text


class RankPool:
    """``size`` ranks, one thread each; they start at the first request, and anew after an end."""

    def __init__(self, size: int, server: Callable[[], Any], backend: str = "gloo") -> None:
        """
        Args:
            server: makes, on each rank, the object whose methods answer.
            backend: "gloo", "fake" for a group that moves nothing, or "none" for no group.
        """
        self.size, self._server, self._backend = size, server, backend
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._directory: str | None = None

    def ask(
        self,
        name: str,
        *arguments: Any,
        within: float,
        ranks: Sequence[int] | None = None,
        failed: Callable[[Any], bool] = lambda answer: isinstance(answer, Failure),
    ) -> list[Any]:
        """The answers of the server's method ``name`` on some ranks, all if not given, in their order.

        Args:
            within: seconds, not counting those in which the machine was busy with other things than these ranks.
            failed: whether an answer says that this rank has left the others, which then have `GRACE_SECONDS`.

        Raises:
            Hang: where ranks do not answer in time, or die.
        """
        if not self._connections:
            self._start()
        asked = {self._connections[rank]: rank for rank in (range(self.size) if ranks is None else ranks)}
        order = list(asked.values())
        for connection in asked:
            connection.send((name, arguments))
        answers: dict[int, Any] = {}
        deadline, held_up = time.monotonic() + within, self._held_up()
        while asked:
            ready = wait(list(asked), max(0.0, deadline - time.monotonic()))
            if not ready and (more := self._held_up() - held_up) > 1.0:
                deadline, held_up = deadline + more, held_up + more
                continue
            if not ready:
                self.close()
                told = f"no answer from rank(s) {sorted(asked.values())}; others: {list(answers.values())}"
                raise Hang(told[:400])
            for connection in ready:
                rank = asked.pop(connection)  # type: ignore[call-overload]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.close()
                    raise Hang(f"rank {rank} died") from None
                if failed(answers[rank]):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [answers[rank] for rank in order]

    def result(self, name: str, *arguments: Any, within: float = 600.0) -> list[Any]:
        """The answers of all ranks.

        Raises:
            RuntimeError: what a rank raised; Hang as for `ask`.
        """
        answers = self.ask(name, *arguments, within=within)
        for answer in answers:
            if isinstance(answer, Failure):
                raise RuntimeError(answer.text)
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        gc.freeze()  # a rank then need not look through what it shares, which would copy it
        for rank in range(self.size):
            here, there = context.Pipe()
            store = Path(self._directory, "store")
            inherited = [*self._connections, here]
            begin = functools.partial(_begin, self._backend, store, rank, self.size)
            process = context.Process(target=_serve, args=(there, inherited, begin, self._server))
            process.daemon = True
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        gc.unfreeze()

    def _held_up(self) -> float:
        """Seconds in which ranks have been ready to run and got no core, all of them together; 0 where none can say."""
        seconds = 0.0
        for process in self._processes:
            with contextlib.suppress(OSError):
                seconds += int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
        return seconds

    def close(self) -> None:
        """Ends the ranks; the next request starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._connections, self._processes, self._directory = [], [], None


def _begin(backend: str, store: Path, rank: int, size: int) -> None:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=size)
    elif backend != "none":
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def _serve(
    connection: Connection,
    inherited: Sequence[Connection],
    begin: Callable[[], None],
    server: Callable[[], Any],
) -> None:
    for other in inherited:  # else a rank would not see that the process which asks has gone
        other.close()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin()
    answering = server()
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            answer = getattr(answering, name)(*arguments)
        except Exception:
            answer = Failure(traceback.format_exc()[-400:])
        with contextlib.suppress(BrokenPipeError):  # the pool has given up on this rank
            connection.send(answer)
