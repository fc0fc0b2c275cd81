"""Shares trials between processes that compute the same problem: each tries other algorithms and posts the times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mucudnn.optimizer import Key
from mucudnn.timing.board import Board, short_name

PATIENCE = 20
"""An algorithm that another process has claimed is tried here, too, once so many looks have found no news of it."""

Name = tuple[str, str]  # (dim, algorithm): what one process tries all sizes of.


class PooledLaunches:
    """The launches of one problem, as the processes that share a board try them.

    The first process at an algorithm along a dim tries it, and posts its launches' times. Times are posted in units of
    torch's own kernel on the whole, which may differ from process to process. Launches of that kernel are nobody's:
    they compute what others' leave.

    Messages have numbers, whoever posts them, so that one look shows whether there is one more.
    """

    def __init__(self, board: Board, problem: Mapping[str, Any], baseline: str) -> None:
        """
        Args:
            problem: what the times of its launches depend on, plain values, the same in all processes.
            baseline: the algorithm that is nobody's.
        """
        self._board, self._problem, self._baseline = board, problem, baseline
        self._ours: set[Name] = set()
        self._elsewhere: dict[Name, int] = {}  # and how many looks have found no news of it
        self._read, self._posted = 0, set[int]()

    def waits(self, fresh: Sequence[Key]) -> bool:
        """Whether launches that were never timed here are another process's to try."""
        return any(key[:2] in self._elsewhere for key in fresh)

    def claim(self, fresh: Sequence[Key]) -> bool:
        """Whether this process is to try launches that were never timed here; if not, another one does."""
        for name in dict.fromkeys(key[:2] for key in fresh if key[1] != self._baseline):
            if name not in self._ours:
                if not self._board.claim(self._name_of("claim", *name)):
                    self._elsewhere[name] = 0
                    return False
                self._ours.add(name)
        return True

    def news(self) -> Iterator[dict[Key, float]]:
        """The ratios that others have posted since, by launch."""
        self._elsewhere = {name: looks + 1 for name, looks in self._elsewhere.items()}
        while (text := self._board.look(self._name_of("message", self._read))) is not None:
            if self._read not in self._posted:
                found = {(dim, algorithm, size): ratio for dim, algorithm, size, ratio in json.loads(text)}
                self._elsewhere.update((key[:2], 0) for key in found if key[:2] in self._elsewhere)
                yield found
            self._read += 1
        for name in [name for name, looks in self._elsewhere.items() if looks > PATIENCE]:
            # Who claimed it may have ended, or have better things to do. From now on both may try the same.
            del self._elsewhere[name]
            self._ours.add(name)

    def post(self, ratios: Mapping[Key, float]) -> None:
        """Posts the times of launches that were timed here for the first time.

        Args:
            ratios: seconds by launch, in units of torch's own kernel on the whole, here.
        """
        number = self._read
        while number in self._posted or not self._board.claim(self._name_of("number", number)):
            number += 1
        self._posted.add(number)
        self._board.post(self._name_of("message", number), json.dumps([(*key, ratios[key]) for key in ratios]))

    def _name_of(self, *what: str | int) -> str:
        return short_name({**self._problem, "pooled": what})
