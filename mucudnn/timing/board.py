"""A board on which processes that run one program share their measurements, so that all arrive at the same plans."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mucudnn.timing.store import canonical

Value = TypeVar("Value")

_log = logging.getLogger("mucudnn")


class Board(ABC):
    """Shares measurements: the first process to claim a piece of work measures and posts it; the others read it.

    Whoever claims a piece posts it before claiming or reading another, so nobody waits in a circle. Which processes
    there are, and when they begin a piece, does not matter.
    """

    @abstractmethod
    def claim(self, name: str) -> bool:
        """Whether this process is the first to claim the name."""

    @abstractmethod
    def post(self, name: str, text: str) -> None:
        """Posts a text under the name, for all to read."""

    @abstractmethod
    def read(self, name: str) -> str:
        """Waits for the text under a claimed name."""

    def once(self, key: Mapping[str, Any], measure: Callable[[], Value]) -> Value:
        """The measurement of one of the processes, plain values: the same for all. If it fails there, with an exception
        of that process, another one measures."""
        for attempt in itertools.count():
            name = short_name({**key, "attempt": attempt} if attempt else key)
            if self.claim(name):
                text = ""
                try:
                    value = measure()
                    text = json.dumps(value)
                finally:
                    self.post(name, text)  # that it failed is posted, too
                return value
            if posted := self.read(name):
                found: Value = json.loads(posted)
                return found
            _log.warning("another process failed to measure %s; it is measured once more", key.get("work"))
        raise AssertionError("attempts do not end")


def short_name(key: Mapping[str, Any]) -> str:
    """A short name that is the same in all processes."""
    return hashlib.sha256(canonical(key).encode()).hexdigest()
