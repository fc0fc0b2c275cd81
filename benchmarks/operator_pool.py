"""Ranks that compare samples one at a time, forked from a process that has imported torch; replaced if they hang."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.operator_rank import Outcome, Rank
from benchmarks.operator_samples import Module, Operator

ANSWER_SECONDS = 30.0
"""A sample for which no rank answers within so long hangs."""

GRACE_SECONDS = 6.0
"""How long the other ranks may take once one has failed: then they wait for it."""


class Hang(RuntimeError):
    """Ranks gave no answer in time."""


class Pool:
    """``size`` ranks over Gloo, one thread each."""

    def __init__(self, size: int, entries: Sequence[Operator | Module], most: int, small_bytes: int) -> None:
        self._size, self._rank = size, (entries, most, small_bytes)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def open(self, entry: int) -> int:
        """How many samples an entry has."""
        return self._ask("open", entry)[0]

    def compare(self, entry: int, sample: int, partition: str) -> Outcome:
        """The ranks' outcome of a sample: that of all of them, or a crash where they differ."""
        try:
            outcomes: list[Outcome] = self._ask("compare", entry, sample, partition)
        except Hang as hang:
            return "hang", "", str(hang)
        kinds = {outcome[0] for outcome in outcomes}
        if len(kinds) == 1 or kinds <= {"right", "gathered", "wrong"}:
            return max(outcomes, key=lambda outcome: outcome[0] == "wrong")
        return "crash", "", f"the ranks differ: {outcomes}"[:400]

    def _ask(self, *request: Any) -> list[Any]:
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send(request)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < self._size:
            waiting = {each: rank for rank, each in enumerate(self._connections) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise Hang(f"no answer from rank(s) {sorted(waiting.values())}; others: {list(answers.values())}"[:400])
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.close()
                    raise Hang(f"rank {rank} died") from None
                if answers[rank] and request[0] == "compare" and answers[rank][0] in ("refused", "crash"):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [answers[rank] for rank in range(self._size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        store = Path(tempfile.mkdtemp(prefix="operators-")) / "store"
        for rank in range(self._size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self._size, store, *self._rank))
            process.daemon = True
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def close(self) -> None:
        """Ends the ranks; the next request starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []


def _serve(connection: Connection, rank: int, size: int, store: Path, *served: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    answering = Rank(*served)
    while True:
        try:
            name, *arguments = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            connection.send(getattr(answering, name)(*arguments))
        except Exception:
            connection.send(("crash", "", traceback.format_exc()[-400:]) if name == "compare" else 0)
