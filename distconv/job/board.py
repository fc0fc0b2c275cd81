"""Shares measurements between the ranks of a job through torch.distributed's key-value store."""

from __future__ import annotations

import time

from torch.distributed import Store  # type: ignore[attr-defined]

from mucudnn.timing.board import Board

_PREFIX = "mucudnn/"
_POLL_SECONDS = 0.005


class StoreBoard(Board):
    """The ranks may call a convolution at different times, or not at all: nothing here is collective."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, name: str) -> bool:
        first: bool = self._store.add(f"{_PREFIX}{name}/claims", 1) == 1
        return first

    def post(self, name: str, text: str) -> None:
        self._store.set(f"{_PREFIX}{name}", text)

    def read(self, name: str) -> str:
        """Waits as long as it takes: whoever has claimed the name posts, or its end is that of the job.

        To go on without would give this rank other plans than the others have. A store that has gone raises its error.
        """
        key = f"{_PREFIX}{name}"
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return bytes(self._store.get(key)).decode()
