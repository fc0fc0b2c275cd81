"""Foresees what the parts of a call take together, in turn, from what one of them does. Nothing here needs torch.

The parts pass the baton as they do in a call (`distconv.turns.baton`), and what was not read for longest leaves the
device as it does there (`distconv.turns.pager`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distconv.turns.tape import LEAST, Begun, Ended, Event, Freed, Joined, Once, Ran, Released, Tape, Waited

Key = tuple[int, int]
"""A storage: the part whose own it is, -1 for all parts, and its number."""


@dataclass(frozen=True)
class Foreseen:
    """Bytes: the most on the device, without and with the scratch of kernels, and what leaves and comes back."""

    peak: int
    with_scratch: int
    spilled: int
    fetched: int


class Deadlock(RuntimeError):
    """Parts that do all the same wait for each other."""


def simulate(tape: Tape, limit: float) -> Foreseen:
    """What all parts of a process take, whose own tensors may take ``limit`` bytes on the device. Deadlock."""
    simulation = _Simulation(tape, limit)
    for section in tape.sections:
        if section.of_parts:
            simulation.run_parts(section.events)
        else:
            simulation.run_caller(section.events)
    memory = simulation.memory
    return Foreseen(memory.peak, memory.with_scratch, memory.written, memory.read)


@dataclass
class _Page:
    size: int
    users: int = 0
    is_away: bool = False
    is_written: bool = False


class _Memory:
    """The bytes of all tensors, and those that may leave the device, within a limit."""

    def __init__(self, now: int, limit: float) -> None:
        self.now = self.peak = self.with_scratch = now
        self.written = self.read = 0
        self._limit, self._away, self._resident = limit, 0, 0
        self._sizes: dict[Key, int] = {}
        self._pages: dict[Key, _Page] = {}
        self._here: OrderedDict[Key, None] = OrderedDict()  # The one that was read last at the end.

    def make(self, made: Iterable[tuple[Key, int]], scratch: int = 0) -> None:
        """An operator has made storages."""
        for key, size in made:
            if key not in self._sizes:
                self._sizes[key] = size
                self.now += size
        here = self.now - self._away
        self.peak, self.with_scratch = max(self.peak, here), max(self.with_scratch, here + scratch)

    def begin(self, keys: Iterable[Key], changes: bool) -> list[_Page]:
        """An operator is to read storages. Returns the pages that stay on the device until `end`."""
        used = {key: page for key in keys if (page := self._pages.get(key)) is not None}
        for key, page in used.items():
            page.users += 1
            if not page.is_away:
                self._here.move_to_end(key)
        for key, page in used.items():
            if page.is_away:
                self._come_back(key, page)
            if changes:
                page.is_written = False
        return list(used.values())

    def end(self, used: list[_Page], made: Iterable[Key] = ()) -> None:
        """It has ended; what it has made may leave from now on."""
        for key in made:
            if key not in self._pages and key in self._sizes:
                page = self._pages[key] = _Page(self._sizes[key], users=1)
                used.append(page)
                self._here[key] = None
                self._resident += page.size
        self._fit()
        for page in used:
            page.users -= 1

    def release(self, key: Key) -> None:
        """A storage may not leave any more."""
        page = self._pages.pop(key, None)
        if page is not None and page.is_away:
            self._away -= page.size
            self.read += page.size
        elif page is not None:
            del self._here[key]
            self._resident -= page.size

    def free(self, key: Key) -> None:
        """Nothing refers to a storage any more."""
        page = self._pages.pop(key, None)
        if page is not None and page.is_away:
            self._away -= page.size
        elif page is not None:
            del self._here[key]
            self._resident -= page.size
        self.now -= self._sizes.pop(key, 0)

    def _come_back(self, key: Key, page: _Page) -> None:
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
            if not page.is_written:
                page.is_written = True
                self.written += page.size
            page.is_away = True
            del self._here[key]
            self._resident -= page.size
            self._away += page.size
            if self._resident + more <= self._limit:
                return


@dataclass
class _Round:
    """A collective of some parts: what each that has come gives and gets, and rows that have not been taken."""

    members: Sequence[int]
    joined: dict[int, Joined] = field(default_factory=dict)
    rows: dict[tuple[int, int], Key] = field(default_factory=dict)  # By who sends and who gets them.
    left: set[int] = field(default_factory=set)

    def serves(self, part: int) -> bool:
        """Whether a part that has come may go on."""
        needed = self.joined[part].received
        if needed is None:
            return len(self.joined) == len(self.members)
        at = self.members.index(part)
        return all(self.members[at + ahead] in self.joined for ahead in needed if 0 <= at + ahead < len(self.members))


class _Simulation:
    def __init__(self, tape: Tape, limit: float) -> None:
        self._tape = tape
        self._places = list(itertools.product(*map(range, tape.parts)))
        self.memory = _Memory(tape.whole + (len(self._places) - 1) * tape.copied, limit)
        self._rounds: dict[tuple[int, tuple[int, ...]], _Round] = {}
        self._round_of: dict[tuple[int, int], _Round] = {}  # By part and number.
        self._begun_once: set[int] = set()
        self._not_freed_by = dict.fromkeys(tape.common, len(self._places))
        self._copies = itertools.count(max(tape.bytes, default=0) + 1)

    def run_caller(self, events: Sequence[Event]) -> None:
        """What the caller does. What it frees of a part, it frees of all."""
        for event in events:
            if isinstance(event, Freed | Released):
                for part in range(len(self._places)):
                    self._do(part, event, [])
        for _ in self._run(0, [event for event in events if not isinstance(event, Freed | Released)]):
            pass

    def run_parts(self, events: Sequence[Event]) -> None:
        """Lets all parts run to their ends, in the order in which the baton passes."""
        runs = [self._run(part, events) for part in range(len(self._places))]
        waiting: dict[int, _Round | None] = dict.fromkeys(range(len(runs)))  # The one that ran last in front.
        while waiting:
            part = next((part for part, it in waiting.items() if it is None or it.serves(part)), None)
            if part is None:
                raise Deadlock("parts that do the same as one of them wait for each other")
            round = next(runs[part], None)
            del waiting[part]
            if round is not None:
                waiting = {part: round, **waiting}

    def _run(self, part: int, events: Sequence[Event]) -> Iterator[_Round]:
        """Runs a part; gives the collective for which it has to wait."""
        running: list[list[_Page]] = []
        for event in events:
            if isinstance(event, Waited):
                round = self._round_of[part, event.number]
                while not round.serves(part):
                    yield round
                self._leave(part, round)
            elif not isinstance(event, Once):
                self._do(part, event, running)
            elif event.number not in self._begun_once:
                self._begun_once.add(event.number)
                yield from self._run(part, event.events)

    def _do(self, part: int, event: Event, running: list[list[_Page]]) -> None:
        memory, key = self.memory, self._key
        if isinstance(event, Begun):
            running.append(memory.begin([key(part, each) for each in event.storages], event.changes))
        elif isinstance(event, Ran):
            memory.make([(key(part, each), size) for each, size in event.made], event.scratch)
        elif isinstance(event, Ended):
            memory.end(running.pop(), [key(part, each) for each in event.made])
        elif isinstance(event, Released):
            memory.release(key(part, event.storage))
        elif isinstance(event, Joined):
            self._join(part, event)
        elif isinstance(event, Freed):
            left = self._not_freed_by.get(event.storage, 1) - 1
            if event.storage in self._not_freed_by:
                self._not_freed_by[event.storage] = left
            if left <= 0:
                memory.free(key(part, event.storage))

    def _key(self, part: int, storage: int) -> Key:
        return (-1 if storage in self._tape.common else part), storage

    def _join(self, part: int, event: Joined) -> None:
        beside = tuple(at for axis, at in enumerate(self._places[part]) if axis not in event.axes)
        round = self._rounds.get((event.number, beside))
        if round is None:
            members = [
                each
                for each, place in enumerate(self._places)
                if beside == tuple(at for axis, at in enumerate(place) if axis not in event.axes)
            ]
            round = self._rounds[event.number, beside] = _Round(members)
        self._round_of[part, event.number] = round
        round.joined[part] = event
        if event.received is None:
            if len(round.joined) == len(round.members):
                self._compute(round)
            return
        for other in list(round.joined):
            if other != part:
                self._give(round, part, other)
                self._give(round, other, part)

    def _give(self, round: _Round, source: int, to: int) -> None:
        """A member gives rows to another one, if it sends any."""
        ahead = round.members.index(to) - round.members.index(source)
        if ahead in dict(round.joined[source].sent):
            copy = round.rows.pop((source, to), None)
            given = [self._key(source, each) for each in round.joined[source].inputs] if copy is None else [copy]
            self._copied(given, [self._key(to, each) for each in round.joined[to].outputs])
            if copy is not None:
                self.memory.free(copy)

    def _leave(self, part: int, round: _Round) -> None:
        """A part goes on, and may change its tensors: rows that have not been taken are copies from then on."""
        if part in round.left:
            return
        round.left.add(part)
        event = round.joined[part]
        for ahead, size in event.sent:
            at = round.members.index(part) + ahead
            if 0 <= at < len(round.members) and round.members[at] not in round.joined:
                copy = round.rows[part, round.members[at]] = (-1, next(self._copies))
                used = self.memory.begin([self._key(part, each) for each in event.inputs], False)
                self.memory.make([(copy, size)])
                self.memory.end(used, [copy] if size >= LEAST else [])

    def _compute(self, round: _Round) -> None:
        """All have come: what is done for all at once."""
        events = [(part, round.joined[part]) for part in round.members]
        inputs = [[self._key(part, each) for each in event.inputs] for part, event in events]
        outputs = [[self._key(part, each) for each in event.outputs or event.inputs] for part, event in events]
        name = events[0][1].name
        if "reduce" in name:
            self._reduce(inputs, outputs)
        elif name == "all_gather_single":
            self._copied([*itertools.chain(*inputs)], outputs[0])
            for made in outputs[1:]:
                self._copied(outputs[0], made)
        else:
            for given, made in itertools.product(inputs if name != "barrier" else [], outputs):
                self._copied(given, made)

    def _reduce(self, inputs: list[list[Key]], outputs: list[list[Key]]) -> None:
        """Inputs are added up one by one, and copied."""
        for given, made in zip(zip(*inputs, strict=True), zip(*outputs, strict=False), strict=False):
            size, total = self._tape.bytes.get(given[0][1], 0), given[0]
            for each in given[1:]:
                used, sum = self.memory.begin([total, each], False), (-1, next(self._copies))
                self.memory.make([(sum, size)])
                self.memory.end(used, [sum] if size >= LEAST else [])
                if total != given[0]:
                    self.memory.free(total)
                total = sum
            for each in made:
                self._copied([total], [each])
            if total != given[0]:
                self.memory.free(total)

    def _copied(self, given: list[Key], made: list[Key]) -> None:
        self.memory.end(self.memory.begin([*given, *made], True))
