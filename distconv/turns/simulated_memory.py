"""The memory of parts in a simulation, as `distconv.turns.pager` would keep it. Nothing here needs torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from distconv.turns.tape import is_copied, least_within

Key = int
"""A storage: a number that is its own among those of all parts."""


@dataclass
class SimulatedPage:
    size: int
    users: int = 0
    is_away: bool = False
    is_written: bool = False


class SimulatedMemory:
    """The bytes of all tensors, and those that may leave the device, within a limit."""

    def __init__(self, now: int, limit: float) -> None:
        self.now = self.peak = self.with_scratch = now
        self.written = self.read = 0
        self._limit, self._away, self._resident = limit, 0, 0
        self._least = least_within(limit)
        self._sizes: dict[Key, int] = {}
        self._pages: dict[Key, SimulatedPage] = {}
        self._here: OrderedDict[Key, None] = OrderedDict()  # The one that was read last at the end.

    @property
    def here(self) -> int:
        """Bytes on the device."""
        return self.now - self._away

    def make(self, made: Iterable[tuple[Key, int]], scratch: int = 0) -> None:
        """An operator has made storages."""
        for key, size in made:
            if key not in self._sizes:
                self._sizes[key] = size
                self.now += size
        self._note_peak(scratch)

    def _note_peak(self, scratch: int = 0) -> None:
        here = self.now - self._away
        if here > self.peak:
            self.peak = here
        if here + scratch > self.with_scratch:
            self.with_scratch = here + scratch

    def change(self, bytes_: int, most: int, with_scratch: int) -> None:
        """Operators on storages that stay have changed the bytes on the device, by ``most`` in between, and by
        ``with_scratch`` with the scratch memory of kernels."""
        here = self.now - self._away
        self.peak = max(self.peak, here + most)
        self.with_scratch = max(self.with_scratch, here + with_scratch)
        self.now += bytes_

    def begin(self, keys: Iterable[Key], changes: bool, copied: Key | None = None) -> list[SimulatedPage]:
        """An operator is to read storages. Returns the pages that stay on the device until `end`. ``copied``: as of
        `distconv.turns.tape.Begun`."""
        used = {key: page for key in keys if (page := self._pages.get(key)) is not None}
        if copied is not None and copied in used and is_copied(used[copied].size, used[copied].users, self._limit):
            page = used.pop(copied)
            if not page.is_away:
                self._leave(copied, page)
            self._fit(page.size)
            self.read += page.size
        for key, page in used.items():
            page.users += 1
            if not page.is_away:
                self._here.move_to_end(key)
        for key, page in used.items():
            if page.is_away:
                self._fetch(key, page)
            if changes:
                page.is_written = False
        self._note_peak()
        return list(used.values())

    def end(self, used: list[SimulatedPage], made: Iterable[Key] = ()) -> None:
        """It has ended; what it has made may leave from now on."""
        for key in made:
            if key not in self._pages and self._sizes.get(key, 0) >= self._least:
                page = self._pages[key] = SimulatedPage(self._sizes[key], users=1)
                used.append(page)
                self._here[key] = None
                self._resident += page.size
        self._fit()
        for page in used:
            page.users -= 1

    def release(self, key: Key) -> None:
        """A storage may not leave any more."""
        page = self._forget(key)
        if page is not None and page.is_away:
            self.read += page.size
            self._note_peak()

    def free(self, key: Key) -> None:
        """Nothing refers to a storage any more."""
        self._forget(key)
        self.now -= self._sizes.pop(key, 0)

    def _forget(self, key: Key) -> SimulatedPage | None:
        page = self._pages.pop(key, None)
        if page is not None and page.is_away:
            self._away -= page.size
        elif page is not None:
            del self._here[key]
            self._resident -= page.size
        return page

    def _fetch(self, key: Key, page: SimulatedPage) -> None:
        self._fit(page.size)
        page.is_away = False
        self._away -= page.size
        self._resident += page.size
        self.read += page.size
        self._here[key] = None

    def _fit(self, more: int = 0) -> None:
        if self._resident + more <= self._limit:
            return
        for key in list(self._here):
            page = self._pages[key]
            if page.users:
                continue
            self._leave(key, page)
            if self._resident + more <= self._limit:
                return

    def _leave(self, key: Key, page: SimulatedPage) -> None:
        if not page.is_written:
            page.is_written = True
            self.written += page.size
        page.is_away = True
        del self._here[key]
        self._resident -= page.size
        self._away += page.size
