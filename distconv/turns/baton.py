"""The baton: lets one of several threads compute at a time, in an order that does not depend on timing.

Each part of a call in turn has a thread. A part that waits for another one passes the baton to the part that ran last
among those that can go on. So the order turns round at every exchange, and the tensors made last are used first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mucudnn.process import renewed


class Abandoned(BaseException):
    """Another part has failed, or the caller was interrupted: this one ends too."""


class UnlikeCollectives(RuntimeError):
    """The parts wait for each other in unlike collectives, or for one that has ended."""


Outside = Callable[[bool, BaseException | None], tuple[bool, BaseException | None]]
"""Called when no part of this process can go on, or all have ended, to receive messages of other ranks.

Args: whether some parts wait; the error with which all are to end, if any. Returns: whether no more messages come; the
error with which all parts are to end, if any.
"""


class Baton:
    """Passed among so many parts, between calls of `run`, whose thread has it when no part can go on.

    Args:
        arrive: called with each part that gets the baton, and with None before it returns to the thread of `run`.
        leave: called with each part that passes the baton on.
        outside: receives messages of other ranks, for which parts may wait besides each other; None: there are none.
    """

    def __init__(
        self,
        parts: int,
        arrive: Callable[[int | None], None],
        leave: Callable[[int], None],
        outside: Outside | None = None,
    ) -> None:
        self._gates = [_closed() for _ in range(parts)]  # Each opens when its part gets the baton.
        self._home = _closed()  # Opens when the thread of `run` gets it.
        self._arrive, self._leave, self._outside = arrive, leave, outside
        self.failure: BaseException | None = None  # Why all parts are to end.
        self._begin()

    def _begin(self) -> None:
        self.failure = None
        self._open: dict[int, Callable[[], bool] | None] = dict.fromkeys(range(len(self._gates)))
        """The parts that have not ended, the one that ran last in front, and whether what each waits for is ready."""

    def run(self) -> None:
        """Lets all parts run to their ends. Raises what the first part that failed has raised."""
        self._begin()
        following: int | None = 0
        is_over = self._outside is None
        while following is not None or not is_over:
            if following is not None:
                self._pass(following)
                self._await_return()
            if not is_over:
                is_over = self._ask_outside()
            following = self._next()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _await_return(self) -> None:
        while True:
            try:
                self._home.acquire()
                return
            except BaseException as error:  # such as Ctrl-C: the parts end where they next wait
                self.failure = self.failure or error

    def _ask_outside(self) -> bool:
        """Receives messages of other ranks. Returns whether no more come."""
        assert self._outside is not None
        try:
            is_over, self.failure = self._outside(bool(self._open), self.failure)
        except BaseException as error:  # such as that another rank has gone
            self.failure, is_over = error, True
        return is_over

    def start(self, part: int) -> None:
        """Called first by a part's thread: returns when the part gets the baton for the first time."""
        self._gates[part].acquire()

    def wait(self, part: int, is_ready: Callable[[], bool], what: str) -> None:
        """Returns when something is ready, while other parts run. Abandoned where one of them has failed."""
        while True:
            if self.failure is not None:
                raise Abandoned
            if is_ready():
                return
            self._open.pop(part)
            self._open = {part: is_ready, **self._open}
            following = self._next()
            if following is None and self._outside is None:
                raise UnlikeCollectives(f"part {part} waits in {what} for parts that wait elsewhere, or have ended")
            self._change_state(self._leave, part)
            self._go_on(following)
            self._gates[part].acquire()

    def end(self, part: int, error: BaseException | None) -> None:
        """Called last by a part's thread."""
        if error is not None and self.failure is None and not isinstance(error, Abandoned):
            self.failure = error
        self._open.pop(part)
        self._change_state(self._leave, part)
        following = self._next()
        if following is None and self._open and self._outside is None:
            self.failure = self.failure or UnlikeCollectives(f"part {part} has ended, and others wait for it")
            following = self._next()
        self._go_on(following)

    def _go_on(self, following: int | None) -> None:
        """Passes the baton to a part; if none can go on, to the thread of `run`."""
        if following is None:
            self._change_state(self._arrive, None)
            self._home.release()
        else:
            self._pass(following)

    def _next(self) -> int | None:
        """The part that goes on; where all are to end, any; None where none can."""
        for part, is_ready in self._open.items():
            if self.failure is not None or is_ready is None or is_ready():
                return part
        return None

    def _pass(self, part: int) -> None:
        self._change_state(self._arrive, part)
        self._gates[part].release()

    def _change_state(self, change: Callable[[Any], None], part: int | None) -> None:
        """Calls ``arrive`` or ``leave``. An error ends all parts, so that no thread waits for ever."""
        try:
            change(part)
        except BaseException as error:
            self.failure = self.failure or error


def _closed() -> threading.Lock:
    """A lock that one thread releases to let another one go on, which takes less time than a semaphore."""
    made = renewed(threading.Lock())
    made.acquire()
    return made
