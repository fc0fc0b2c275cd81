"""Runs a script's own signal handlers at the same point of the program on every rank.

A signal reaches the ranks at slightly different moments. Suppose a handler sets a flag that the script checks after
each step: it would end one rank a step before another, which then waits for it. So a handler waits for the next point
that all ranks reach, the end of an optimizer's step. The ranks publish how many steps they have finished,
none continues before all have done so, and the handler runs after the step that follows the largest number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from distconv.job.signals import PASSED_ON, SAME_SECONDS
from distconv.tensors.untraced import untraced
from mucudnn.process import in_child, renewed

NO_STEP_SECONDS = 2.0  # after which the handler runs where no step has ended, in a script that waits or evaluates
LONGEST_STEPS = 3.0  # the same, in times the longest step so far
AGREE_SECONDS = 10.0  # after which it runs where another rank has not received the signal

Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def common_handlers(store: Store, rank: int, size: int) -> Iterator[None]:
    """A context in which the main thread's signal handlers run on all `size` ranks after the same optimizer step.

    That is so for SIGINT (KeyboardInterrupt, too), SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. A rank that takes no
    step runs the handler after NO_STEP_SECONDS. Where `size` is 1 nothing changes.
    """
    if size == 1:
        yield
        return
    common = _CommonHandlers(store.clone(), rank, size)  # type: ignore[attr-defined]  # a connection of its own
    with common.installed():
        yield


class _CommonHandlers:
    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._install, self._installed_for = signal.signal, signal.getsignal
        self._handlers: dict[int, Handler] = {}  # the script's own
        self._lock = renewed(threading.RLock())  # a handler may interrupt the main thread while that has it
        self._steps = 0
        self._longest = 0.0  # seconds from the end of a step to the end of the next
        self._ended: float | None = None  # when the last one ended
        self._pending: dict[int, str] = {}  # signals that have arrived, and under which key the ranks agree on each
        self._counts: dict[int, int] = {}  # how often each has arrived
        self._last: dict[int, float] = {}
        self._main = threading.get_ident()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, end == read)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        hook = register_optimizer_step_post_hook(untraced(lambda *_: self._step_ended()))
        signal.signal, signal.getsignal = self._set, self._get  # type: ignore[assignment]
        in_child(self._leave_to_child)
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._set(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            for number, handler in list(self._handlers.items()):
                # A signal that has arrived may arrive once more, from the terminal and from the launcher.
                self._install(number, signal.SIG_IGN if number in self._counts else handler)
            self._handlers.clear()
            signal.signal, signal.getsignal = self._install, self._installed_for
            hook.remove()
            signal.set_wakeup_fd(before)

    def _set(self, number: int, handler: Any) -> Any:
        previous = self._get(number)
        if number in PASSED_ON and callable(handler):
            self._install(number, self._arrived)
            self._handlers[number] = handler
        else:
            self._install(number, handler)
            self._handlers.pop(number, None)
        return previous

    def _get(self, number: int) -> Any:
        return self._handlers.get(number) or self._installed_for(number)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """Runs the handler, in the main thread, if the ranks have agreed to run it now; else `_listen` notes it."""
        with self._lock:
            run = self._pending.get(number) == ""
            if run:
                del self._pending[number]
        if run:
            self._handle(number, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if handler := self._handlers.get(number):
            handler(number, frame)

    def _listen(self, read: int) -> None:
        """Runs in a thread of its own, as the main thread may be inside a collective that waits for another rank."""
        while received := os.read(read, 1):
            number, now = received[0], time.monotonic()
            if number not in self._handlers or number in self._pending:
                continue
            if now - self._last.get(number, -SAME_SECONDS) >= SAME_SECONDS:
                self._last[number] = now
                self._counts[number] = self._counts.get(number, 0) + 1
                key = f"distconv/signal/{number}/{self._counts[number]}"
                with self._lock, contextlib.suppress(dist.DistError):
                    self._pending[number] = key
                    self._store.set(f"{key}/{self._rank}", str(self._steps))
                threading.Thread(target=self._run_without_step, args=(number, key), daemon=True).start()

    def _target(self, key: str) -> int:
        """After how many steps the handler runs: one more than the largest number that a rank has published."""
        deadline = time.monotonic() + AGREE_SECONDS
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < deadline:
                if self._store.check(keys):
                    return max(int(self._store.get(key)) for key in keys) + 1
                time.sleep(0.005)
        return 0

    def _step_ended(self) -> None:
        if threading.get_ident() != self._main:
            return
        with self._lock:
            now = time.monotonic()
            self._longest = max(self._longest, now - (self._ended or now))
            self._steps, self._ended = self._steps + 1, now
            pending = dict(self._pending)
        for number, key in pending.items():
            if self._steps >= self._target(key):
                with self._lock:
                    mine = self._pending.pop(number, None) is not None
                if mine:
                    self._handle(number, sys._getframe(1))

    def _run_without_step(self, number: int, key: str) -> None:
        self._target(key)
        time.sleep(max(NO_STEP_SECONDS, LONGEST_STEPS * self._longest))
        with self._lock:
            if self._pending.get(number) != key:
                return
            self._pending[number] = ""  # agreed: now
        signal.pthread_kill(self._main, number)

    def _leave_to_child(self) -> None:
        """Gives a process that the script forks, such as a DataLoader's worker, the script's handlers as they are."""
        if signal.signal == self._set:
            signal.signal, signal.getsignal = self._install, self._installed_for
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
