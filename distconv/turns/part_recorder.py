"""Records the storages and operators of one part of a call on a `Tape`, while it is followed by its tensors' shapes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from distconv.rules.operands import once
from distconv.turns.collectives import CollectiveArguments
from distconv.turns.following import FollowingPager
from distconv.turns.group import Key
from distconv.turns.operations import add_work, scratch_bytes
from distconv.turns.pages import Page, Paged
from distconv.turns.rounds import RowsRound
from distconv.turns.shapes_only import fake_tensors
from distconv.turns.tape import (
    LEAST,
    Begun,
    ByteChange,
    Ended,
    Event,
    Eviction,
    Freed,
    Joined,
    Once,
    PagedOperator,
    Ran,
    Released,
    Section,
    Tape,
    Waited,
)


class NoSlice(Exception):
    """A group of parts is no slice of the mesh, so that other parts may not do what the recorded one does."""


_NEVER = -(1 << 62)  # Less than any bytes.


class PartRecorder(FollowingPager):
    """A pager that lets nothing leave the device, and records what it is notified of.

    A simulation reads the tape once for each part and each limit, so it is short. Many operators only make views, and
    most storages are so small that they stay on the device until they are freed: what such operators do is one sum of
    bytes. Only what may leave the device is recorded storage by storage.
    """

    def __init__(self, tape: Tape, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.tape = tape
        self._numbers = {x.untyped_storage()._cdata: -1 for x in known}  # By address, of storages that are alive.
        self._unnoted = deque[int]()  # Numbers of freed storages: a garbage collection may free some at any point.
        self._leaving: set[int] = set()  # Numbers of storages that may leave the device.
        self._running: list[int | None] = []  # Where each operator that has not ended began; None: it reads no pages.
        self._is_evicted = False  # Whether nothing has come to the device since the last eviction.
        self._is_quiet, self._once = False, False
        self._collectives = self._onces = 0
        self._events: list[Event] = []
        tape.whole = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in known}.values())
        self.begin_section(of_parts=False)

    def begin_section(self, of_parts: bool) -> None:
        """Begins the record of what each part does, or the caller."""
        self._note_freed()
        self._events, self._is_evicted = [], False
        self.tape.sections.append(Section(of_parts, self._events))

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, Page], call: Paged) -> None:
        if self.propagates or self._is_quiet:
            return
        self._note_freed()
        made = []
        for x in results:
            storage = x.untyped_storage()
            number = self._numbers.get(storage._cdata, -1)
            if storage._cdata not in given and number >= 0 and storage.nbytes() >= LEAST and self._may_leave(storage):
                made.append(number)
        self._leaving.update(made)
        self._note_end(self._running.pop(), tuple(made))

    def _note_end(self, began: int | None, made: tuple[int, ...]) -> None:
        """Notes that an operator has ended: as one event with its beginning, if nothing else happened in between."""
        if began is None and not made:
            if not self._is_evicted:
                self._events.append(Eviction())
                self._is_evicted = True
            return
        begun = Begun((), False) if began is None else self._events[began]
        has_ran = bool(self._events) and isinstance(self._events[-1], Ran)
        first = len(self._events) - has_ran if began is None else began
        ran = self._events[-1] if has_ran else Ran((), 0)
        if len(self._events) > first + (began is not None) + has_ran:
            self._note(Ended(made))
            return
        assert isinstance(begun, Begun) and isinstance(ran, Ran)
        del self._events[first:]
        self._note(PagedOperator(begun.storages, begun.changes, ran.made, ran.scratch, made, begun.copied))

    def begin(self, keys: Sequence[int], changes: bool, call: Paged, copied: int = 0) -> dict[int, Page]:
        if not self.propagates and not self._is_quiet:
            pages = tuple(number for number in self._known(keys) if number in self._leaving)
            if pages:
                first = self._numbers.get(keys[0], -1) if copied else -1
                is_whole = first in pages and self.tape.bytes[first] == copied
                self._note(Begun(pages, changes, first if is_whole else None))
            self._running.append(len(self._events) - 1 if pages else None)
        return {}

    def release(self, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            key = x.untyped_storage()._cdata
        self._note(*(Released(number) for number in self._known([key])))

    def release_all(self, call: Paged) -> None:
        self._note(*(Released(number) for number in sorted({*self._numbers.values()}) if number >= 0))

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Is called after each operator."""
        if self.propagates or self._is_quiet:
            return
        self._note_freed()
        results = [x for x in fake_tensors((result,)) if x.fake_device.type != "meta"]
        made = [number for x in results if (number := self._make(x)) is not None]
        scratch = scratch_bytes(func, args, results)
        if made or scratch:
            self._events.append(Ran(tuple((number, self.tape.bytes[number]) for number in made), scratch))
        work = self.tape.work_once if self._once else self.tape.work
        add_work(work, func, args, kwargs, result, bool(made))

    def once(self, compute: Callable[[], once.Made]) -> once.Made:
        """Records a value that is computed once for all parts, and returns this part's copy."""
        self._note_freed()
        outer, self._events, self._is_evicted = self._events, [], False
        is_inner, self._once = self._once, True
        try:
            made = compute()
        finally:
            self._note_freed()
            block, self._events, self._once = Once(self._onces, self._events), outer, is_inner
            self._onces += 1
            self._note(block)
        return tree_map_only(Tensor, lambda x: x.clone(memory_format=torch.preserve_format), made)

    def joined(self, group: Key, name: str, at: int, given: CollectiveArguments) -> int:
        """Records that the part joins a collective of a group; returns the number of the collective."""
        axes = self._axes_of(group[0])
        sent: tuple[tuple[int, int], ...] = ()
        received = None
        if name == RowsRound.name:
            to, of = given.numbers
            row = given.inputs[0].nbytes // max(sum(to), 1)
            sent = tuple((each - at, rows * row) for each, rows in enumerate(to) if rows and each != at)
            received = tuple(each - at for each, rows in enumerate(of) if rows and each != at)
        inputs, outputs = (
            self._known(x.untyped_storage()._cdata for x in some) for some in (given.inputs, given.outputs)
        )
        self._note(Joined(self._collectives, name, axes, inputs, outputs, sent, received))
        self._collectives += 1
        return self._collectives - 1

    def waited(self, number: int) -> None:
        """Records that the part goes on after a collective."""
        self._note(Waited(number))

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """A context for operators that are not recorded, as the simulation of a collective has them."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def finish(self) -> None:
        """Called when the call is over: the storages that are left are common to all parts."""
        self._note_freed()
        self.tape.common.update(number for number in self._numbers.values() if number >= 0)
        for section in self.tape.sections:
            if section.of_parts:
                section.events[:] = self._summed(section.events)

    def _summed(self, events: Sequence[Event]) -> list[Event]:
        """The events of parts, those on storages that stay on the device until they are freed as sums of bytes."""
        freed = {event.storage for event in events if isinstance(event, Freed)} - self._leaving - self.tape.common
        found: list[Event] = []
        staying: set[int] = set()
        change, most, with_scratch = 0, _NEVER, _NEVER
        for event in events:
            if isinstance(event, Ran) and all(storage in freed for storage, _ in event.made):
                staying.update(storage for storage, _ in event.made)
                change += sum(size for _, size in event.made)
                most, with_scratch = max(most, change), max(with_scratch, change + event.scratch)
            elif isinstance(event, Freed) and event.storage in staying:
                change -= self.tape.bytes[event.storage]
            else:
                if change or most > _NEVER:
                    found.append(ByteChange(change, most, with_scratch))
                    change, most, with_scratch = 0, _NEVER, _NEVER
                found.append(event)
        return [*found, ByteChange(change, most, with_scratch)] if change or most > _NEVER else found

    def _note(self, *events: Event) -> None:
        self._note_freed()
        self._events += events
        self._is_evicted = False

    def _note_freed(self) -> None:
        while self._unnoted:
            self._events.append(Freed(self._unnoted.popleft()))

    def _axes_of(self, members: Sequence[int]) -> tuple[int, ...]:
        places = np.unravel_index(np.asarray(members), self.tape.sizes)
        axes = tuple(axis for axis, of_axis in enumerate(places) if len({*of_axis.tolist()}) > 1)
        if math.prod(self.tape.sizes[axis] for axis in axes) != len(members):
            raise NoSlice
        return axes

    def _known(self, addresses: Iterable[int]) -> tuple[int, ...]:
        found = dict.fromkeys(self._numbers.get(address, -1) for address in addresses)
        return tuple(number for number in found if number >= 0)

    def _make(self, x: Tensor) -> int | None:
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return None
        number = self._numbers[address] = len(self.tape.bytes)
        self.tape.bytes[number] = storage.nbytes()
        if self._once:
            self.tape.common.add(number)
        weakref.finalize(storage, self._is_freed, address, number).atexit = False
        return number

    def _is_freed(self, address: int, number: int) -> None:
        if self._numbers.pop(address, None) is not None:
            self._unnoted.append(number)
