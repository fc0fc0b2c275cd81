"""Boards in memory, for threads that stand in for processes."""

from __future__ import annotations

import threading

from mucudnn.timing.board import Board


class Shared(Board):
    """A board in memory.

    Attributes:
        posts: how often each name was posted.
    """

    def __init__(self) -> None:
        self.posts: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._claimed: set[str] = set()
        self._changed = threading.Condition()

    def claim(self, name: str) -> bool:
        with self._changed:
            first = name not in self._claimed
            self._claimed.add(name)
            return first

    def post(self, name: str, text: str) -> None:
        with self._changed:
            self.posts[name] = self.posts.get(name, 0) + 1
            self._texts[name] = text
            self._changed.notify_all()

    def read(self, name: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._texts, 30.0)
            return self._texts[name]


class Alone(Board):
    """The board of a job's only process."""

    def claim(self, name: str) -> bool:
        return True

    def post(self, name: str, text: str) -> None:
        pass

    def read(self, name: str) -> str:
        raise AssertionError("nobody else has claimed anything")
