"""Keeps calls of several threads apart: while a model runs in parts, its modules have the state of one of them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from mucudnn.process import in_child, print_line, renewed

PATIENCE = 2.0  # Seconds for which a thread waits for others that may be waiting for it.

LONG = 60.0  # Seconds after which a thread that waits for others says so.

WAITS = (
    f"distconv: a model's call in parts has waited for {LONG:g} s for the end of calls of other threads; it waits for"
    " ever if one of these waits for its thread"
)


class CallLock:
    """Is shared by threads whose calls need the models as the program has them, and taken by one that runs parts.

    A thread does not wait for itself. A call whose forward starts a thread that calls a model, and waits for it, shares
    the lock meanwhile: so that thread can share it, too, and take it after a while, if it has some patience.
    """

    def __init__(self) -> None:
        self._changed = renewed(threading.Condition())
        in_child(self._begin)
        self._begin()

    def _begin(self) -> None:
        self._sharing = Counter[int]()  # By thread, how often it shares the lock.
        self._owner, self._depth = 0, 0  # The thread that has taken it, and how often.
        self._waiting = 0  # Threads that wait to take it.

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which no other thread runs parts."""
        own = threading.get_ident()
        with self._changed:
            if self._owner != own and own not in self._sharing:
                self._changed.wait_for(lambda: not self._waiting, PATIENCE)
                self._changed.wait_for(lambda: not self._owner)
            self._sharing[own] += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing[own] -= 1
                if not self._sharing[own]:
                    del self._sharing[own]
                    self._changed.notify_all()

    @contextlib.contextmanager
    def taken(self, patience: float | None = None) -> Iterator[None]:
        """A context in which no other thread calls a model that may run in parts.

        ``patience``: seconds after which the lock is only shared; None: it is taken, however long that takes. A thread
        that shares it only shares it once more.
        """
        with contextlib.nullcontext() if self._take(patience) else self.shared():
            try:
                yield
            finally:
                self._give_back()

    def _take(self, patience: float | None) -> bool:
        own = threading.get_ident()
        with self._changed:
            is_free = self._owner == own or self._is_free()
            if not is_free and own not in self._sharing:
                self._waiting += 1
                is_free = self._changed.wait_for(self._is_free, LONG if patience is None else patience)
                if not is_free and patience is None:
                    print_line(WAITS)
                    is_free = self._changed.wait_for(self._is_free)
                self._waiting -= 1
                self._changed.notify_all()
            if is_free:
                self._owner, self._depth = own, self._depth + 1
            return is_free

    def _is_free(self) -> bool:
        return not self._owner and not self._sharing

    def _give_back(self) -> None:
        with self._changed:
            if self._owner == threading.get_ident():
                self._depth -= 1
                if not self._depth:
                    self._owner = 0
                    self._changed.notify_all()


call_lock = CallLock()  # Of all models, as they may have modules in common.
