"""The storages that the parts of a call have made, and the order in which such calls copy them back to the device."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from mucudnn.process import Recent

NEAR = 2  # A storage that is read now is looked for so many places ahead in the order of the call before.


class Page:
    """A storage.

    Attributes:
        key: where a copy of it is kept, if one is.
        users: operators that run on it.
        number: counts the storages that its call has made.
        away: whether it has left the device.
        stream: in which its memory was allocated.
        copied: the storage, while it is copied beside what is computed: its memory must not be used for others then.
        returns: whether that copy goes to the device.
    """

    __slots__ = ("__weakref__", "away", "copied", "key", "number", "returns", "size", "storage", "stream", "users")

    def __init__(self, storage: torch.UntypedStorage, number: int, stream: Any) -> None:
        self.storage, self.size = weakref.ref(storage), storage.nbytes()
        self.number, self.stream = number, stream
        self.key: Any = None
        self.away, self.returns, self.users = False, False, 0
        self.copied: torch.UntypedStorage | None = None


class _Order:
    """The order in which a call copies storages back, by number.

    Attributes:
        expected: the order of the last call of this kind.
        read: the order of this call, so far.
        found: how many of these were expected.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected, self.found = expected, 0
        self.read: list[int] = []

    def of_next_call(self) -> Sequence[int]:
        """The expected order, if it was of use, else the order of this call: early copies make others leave."""
        return self.expected if self.expected and 2 * self.found >= len(self.read) else self.read


class Paged:
    """A call of a model, whose storages may leave the device.

    Args:
        limit: the most bytes of its storages on the device while its operators run; more where one needs more.
        kind: equal for calls that are expected to copy back the same storages in the same order.
    """

    def __init__(self, limit: int, kind: Hashable = None) -> None:
        self.limit = limit
        self.keys: set[int] = set()  # The storages that it has made.
        self._pages: list[weakref.ref[Page]] = []
        before = _orders.get(kind)
        self._order = _Order(() if before is None else before.of_next_call())
        self._at = 0  # The number of expected storages that have been read.
        if kind is not None:
            _orders[kind] = self._order

    def made(self, storage: torch.UntypedStorage, stream: Any) -> Page:
        """The call has made a storage."""
        page = Page(storage, len(self._pages), stream)
        self._pages.append(weakref.ref(page))
        return page

    def next_of(self, pages: Iterable[Page]) -> Page | None:
        """Notes that pages are read that had left. Returns the page that the last call of this kind read next of those
        that had left, if this call has it."""
        order = self._order
        for page in pages:
            if page.number >= len(self._pages) or self._pages[page.number]() is not page:
                continue  # another call's
            order.read.append(page.number)
            near = order.expected[self._at : self._at + NEAR]
            if page.number in near:  # else another one has left this time
                self._at += near.index(page.number) + 1
                order.found += 1
        following = order.expected[self._at : self._at + 1]
        return self._pages[following[0]]() if following and following[0] < len(self._pages) else None


_orders: Recent[Hashable, _Order] = Recent(64)  # The order of the last call of each kind.
