"""Makes a `Tape` shorter: a simulation reads it once for each part and each limit.

Many operators only make views, and most storages are so small that they stay on the device until they are freed. What
such operators do is one sum of bytes. Only what may leave the device is simulated storage by storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distconv.turns.tape import Begun, ByteChange, Ended, Event, Eviction, Freed, Once, PagedOperator, Ran, Tape

_NEVER = -(1 << 62)  # Less than any bytes.


def compact(tape: Tape) -> Tape:
    """A tape of which a simulation predicts the same. The caller's own events, which are few, stay as they are."""
    pages = {storage for section in tape.sections for storage in _pages(section.events)}
    return replace(
        tape,
        sections=[
            section._replace(events=_Compaction(tape, pages, section.events).events) if section.of_parts else section
            for section in tape.sections
        ],
    )


def _pages(events: Sequence[Event]) -> set[int]:
    """The storages that may leave the device."""
    found = set[int]()
    for event in events:
        if isinstance(event, Ended):
            found.update(event.made)
        elif isinstance(event, Once):
            found |= _pages(event.events)
    return found


class _Compaction:
    """Events of parts, in a shorter form. ``pages``: the storages that may leave the device."""

    def __init__(self, tape: Tape, pages: set[int], events: Sequence[Event]) -> None:
        freed = {event.storage for event in events if isinstance(event, Freed)}
        made = {storage for event in events if isinstance(event, Ran) for storage, _ in event.made}
        self._pages, self._bytes = pages, tape.bytes
        self._staying = (made & freed) - pages - tape.common
        self._running: list[int | None] = []  # Where each operator that has not ended began; None: it reads no pages.
        self._is_evicted = False
        self.events: list[Event] = []
        self._begin_sum()
        for event in events:
            self._add(event)
        self._end_sum()

    def _begin_sum(self) -> None:
        self._change, self._most, self._with_scratch = 0, _NEVER, _NEVER

    def _end_sum(self) -> None:
        if self._change or self._most > _NEVER:
            self.events.append(ByteChange(self._change, self._most, self._with_scratch))
        self._begin_sum()

    def _add(self, event: Event) -> None:
        if isinstance(event, Begun):
            self._begun(event)
        elif isinstance(event, Ran):
            self._ran(event)
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, Freed) and event.storage in self._staying:
            self._change -= self._bytes[event.storage]
        else:
            self._end_sum()
            self.events.append(event)
            self._is_evicted = False

    def _begun(self, event: Begun) -> None:
        storages = tuple(storage for storage in event.storages if storage in self._pages)
        if storages:
            self._end_sum()
            self._is_evicted = False
        self._running.append(len(self.events) if storages else None)
        if storages:
            self.events.append(Begun(storages, event.changes))

    def _ran(self, event: Ran) -> None:
        others = tuple(each for each in event.made if each[0] not in self._staying)
        self._change += sum(size for storage, size in event.made if storage in self._staying)
        if others:
            self._end_sum()
            self.events.append(Ran(others, event.scratch))
        else:
            self._most = max(self._most, self._change)
            self._with_scratch = max(self._with_scratch, self._change + event.scratch)

    def _ended(self, event: Ended) -> None:
        began = self._running.pop()
        if began is None and not event.made:
            if not self._is_evicted:
                self._end_sum()
                self.events.append(Eviction())
                self._is_evicted = True
            return
        self._end_sum()
        self._is_evicted = False
        within = self.events[len(self.events) if began is None else began + 1 :]
        if began is None and self.events and isinstance(self.events[-1], Ran):
            within = self.events[-1:]
        if len(within) > 1 or not all(isinstance(each, Ran) for each in within):
            self.events.append(event if began is not None else PagedOperator((), False, (), 0, event.made))
            return
        ran = within[0] if within else Ran((), 0)
        begun = self.events[began] if began is not None else Begun((), False)
        assert isinstance(ran, Ran) and isinstance(begun, Begun)
        del self.events[len(self.events) - len(within) - (began is not None) :]
        self.events.append(PagedOperator(begun.storages, begun.changes, ran.made, ran.scratch, event.made))
