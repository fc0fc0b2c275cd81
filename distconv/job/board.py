"""Board: the ranks of a job share measurements through torch.distributed's key-value store."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]

from mucudnn.timing.board import Board

_PREFIX = "mucudnn/"


class StoreBoard(Board):
    """The ranks may come to a convolution at different times, or not at all: nothing here is collective."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, name: str) -> bool:
        first: bool = self._store.add(f"{_PREFIX}{name}/claims", 1) == 1
        return first

    def post(self, name: str, text: str) -> None:
        self._store.set(f"{_PREFIX}{name}", text)

    def look(self, name: str) -> str | None:
        return self.read(name) if self._store.check([f"{_PREFIX}{name}"]) else None

    def read(self, name: str) -> str | None:
        try:
            return bytes(self._store.get(f"{_PREFIX}{name}")).decode()
        except RuntimeError:  # torch's store errors: nobody posted within the store's timeout
            return None
