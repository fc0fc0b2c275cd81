"""Finds where training steps begin, which of them repeat, and how much workspace their convolutions may use.

A script does not say where its steps begin, but its convolutions show it: after a convolution of the backward pass, the
next forward one begins a new step. With gradient accumulation or checkpointing this finds several steps where the
script has one. Their peaks are no higher than that of the script's step, so their budgets are safe.

Two steps are the same if they call the same convolutions in the same order. Torch's own kernels compute the first step
of its kind. If the next step is the same, the recorder is switched on during it, and the two steps after it are
recorded, all with torch's own kernels. From then on such steps have budgets. If shapes change, the convolutions and so
the steps are different ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mucudnn.budgets.memory import MemoryRecorder
from mucudnn.optimizer import StepTimeline, common
from mucudnn.process import Recent

RECORDED = 2
"""The number of steps that are recorded before there are budgets. Two, because if gradients accumulate over two steps,
every second one begins without gradients and has a lower peak."""

MOST_TRIES = 3
"""The most recordings that are begun for a step. If it never comes often enough in a row, it stays without budgets."""

MOST_STEPS = 256
"""The most recorded steps that are known at once; the oldest ones are dropped, and recorded anew if they recur."""

MOST_CALLS = 100_000  # A longer sequence of convolutions does not count as a step: such a program only goes forward.


@dataclass(frozen=True)
class Step:
    """A step that has been recorded."""

    calls: tuple[Hashable, ...]  # Names of its convolutions, in order.
    timeline: StepTimeline  # Of its memory.
    budgets: tuple[int, ...]  # Bytes of workspace for each call.


class Steps:
    """The steps of a running program, for one thread at a time."""

    def __init__(self, recorder: MemoryRecorder, budgets: Callable[[StepTimeline], tuple[int, ...]]) -> None:
        self.known: Recent[tuple[Hashable, ...], Step] = Recent(MOST_STEPS)  # The recorded steps by their calls.
        self.last: Step | None = None  # The recorded step that was last gone through.
        self._recorder, self._budgets = recorder, budgets
        self._calls: list[Hashable] = []
        self._threads: set[int] = set()
        self._went_back = False
        self._candidates: list[Step] = []
        self._tries: Recent[tuple[Hashable, ...], int] = Recent(MOST_STEPS)
        self._awaited: tuple[Hashable, ...] | None = None
        self._passed = 0

    def call(self, name: Hashable, forward: bool, size: int) -> int | None:
        """Notes a call, and returns the bytes of workspace that it may use; `None` while they are not known.

        Args:
            name: of the convolution; equal for calls of the same shapes and direction.
            forward: whether its direction is forward.
            size: bytes that are alive with its result and were not at the call before.
        """
        if forward and self._went_back:
            self._next_step()
        self._went_back = not forward
        place = len(self._calls)
        if place >= MOST_CALLS:
            return None
        self._calls.append(name)
        self._threads.add(threading.get_ident())
        if self._awaited is not None:
            self._recorder.mark(size)
            return None
        self._candidates = [step for step in self._candidates if place < len(step.calls) and step.calls[place] == name]
        return min((step.budgets[place] for step in self._candidates), default=None)

    def close(self) -> None:
        """Ends a recording that is going on."""
        if self._awaited is not None:
            self._awaited = None
            self._recorder.stop()

    def _next_step(self) -> None:
        done, self._calls = tuple(self._calls), []
        threads, self._threads = self._threads, set()
        self.last = self.known.get(done, self.last)
        if self._awaited is None:
            self._record(done, threads)
        elif done != self._awaited or not self._is_seen(threads):
            self._awaited = None
            self._recorder.stop()
        else:
            self._passed += 1
            self._recorder.step()
            if self._passed > RECORDED:
                self._awaited = None
                timeline = common(self._recorder.stop())
                self.last = self.known[done] = Step(done, timeline, self._budgets(timeline))
        self._candidates = list(self.known.values())

    def _record(self, done: tuple[Hashable, ...], threads: set[int]) -> None:
        """Starts the recorder if steps like the one that is done are worth it.

        Never where a recording has just ended: the operators and scopes that are open here began under it, and torch's
        profiler writes their ends to the memory of the recording it finds then.
        """
        tries = self._tries.get(done, 0)
        may_record = self._is_seen(threads) and len(done) < MOST_CALLS and tries < MOST_TRIES
        if done not in self.known and may_record and self._recorder.start():
            self._tries[done] = tries + 1
            self._awaited, self._passed = done, 0

    def _is_seen(self, threads: set[int]) -> bool:
        return len(threads) == 1 or not self._recorder.one_thread
