"""Predicts the memory that all parts of a call take in turn, from a `Tape` of one of them, without torch.

The simulated parts run in the order of a real call (`distconv.turns.baton`), and the least recently read storages leave
the device as in a real call (`distconv.turns.pager`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distconv.turns.simulated_memory import Key, SimulatedMemory, SimulatedPage
from distconv.turns.tape import (
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
    Tape,
    Waited,
)
from distconv.turns.work import Followed


def simulate(tape: Tape, limit: float) -> Followed:
    """The memory and transfers of all parts of a process, whose tensors may take ``limit`` bytes on the device; without
    the bytes sent to other ranks."""
    simulation = _Simulation(tape, limit)
    between, parts = 0, math.prod(tape.parts)
    for number, section in enumerate(tape.sections):
        if number == tape.forward:
            between = simulation.memory.here
        if section.of_parts:
            simulation.run_parts(section.events)
        else:
            simulation.run_caller(section.events)
    memory = simulation.memory
    return Followed(
        memory.peak,
        tape.whole,
        tape.results,
        memory.written,
        memory.read,
        parts * tape.exchanged,
        work=tape.work_once.plus(tape.work, parts),
        with_scratch=memory.with_scratch,
        kept=max(between - tape.whole - tape.results, 0),
    )


@dataclass
class _Round:
    """A collective of some parts."""

    members: Sequence[int]
    are_two: bool  # Whether the group has two members: then the distances 1 and -1 mean the same member.
    joined: dict[int, Joined] = field(default_factory=dict)  # The parts that have joined, with their tensors.
    turn: dict[int, int] = field(default_factory=dict)  # The parts that have joined, with the number of earlier ones.
    rows: dict[tuple[int, int], Key] = field(default_factory=dict)
    """Copies of rows that are not received yet, by the sending and the receiving part."""
    left: set[int] = field(default_factory=set)  # The parts that have gone on.

    def may_go_on(self, part: int) -> bool:
        """Whether all members have joined from which a part needs something."""
        needed = self.joined[part].received
        if needed is None:
            return len(self.joined) == len(self.members)
        for distance in needed:
            other = self.member(part, distance)
            if other is not None and other not in self.joined:
                return False
        return True

    def member(self, part: int, distance: int) -> int | None:
        """The member at a distance from a part along the group, if it is a part of this process."""
        at = bisect_left(self.members, part) + distance
        if self.are_two:
            at %= 2
        return self.members[at] if 0 <= at < len(self.members) else None


def _freed_once(events: Sequence[Event]) -> Iterator[int]:
    """The storages that are freed while something is computed once for all parts."""
    for once in events:
        if isinstance(once, Once):
            yield from (event.storage for event in once.events if isinstance(event, Freed))
            yield from _freed_once(once.events)


class _Simulation:
    def __init__(self, tape: Tape, limit: float) -> None:
        self._tape = tape
        self._places = list(itertools.product(*map(range, tape.parts)))
        self._members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}  # By axes and the place beside.
        self.memory = SimulatedMemory(tape.whole + (len(self._places) - 1) * tape.copied, limit)
        self._rounds: dict[tuple[int, tuple[int, ...]], _Round] = {}
        self._round_of: dict[tuple[int, int], _Round] = {}  # By part and number.
        self._begun_once: set[int] = set()
        self._not_freed_by = dict.fromkeys(tape.common, len(self._places))
        for section in tape.sections:
            self._not_freed_by |= dict.fromkeys(_freed_once(section.events), 1)
        self._stride = max(tape.bytes, default=0) + 1
        self._copies = itertools.count(-1 - self._stride, -1)  # Beyond the keys of storages that parts share.

    def run_caller(self, events: Sequence[Event]) -> None:
        """Simulates events of the caller. If it frees a storage of the recorded part, it frees those of all parts."""
        running: list[list[SimulatedPage]] = []
        for event in events:
            for part in range(len(self._places) if isinstance(event, Freed | Released) else 1):
                self._do(part, event, running)

    def run_parts(self, events: Sequence[Event]) -> None:
        """Lets all parts run to their ends, in the order in which the baton passes."""
        runs = [self._run(part, events) for part in range(len(self._places))]
        waiting: dict[int, _Round | None] = dict.fromkeys(range(len(runs)))  # The part that ran last comes first.
        while waiting:
            # Some part can always go on: all parts have the same events, so each joins what others wait for.
            part = next(part for part, it in waiting.items() if it is None or it.may_go_on(part))
            round = next(runs[part], None)
            del waiting[part]
            if round is not None:
                waiting = {part: round, **waiting}

    def _run(self, part: int, events: Sequence[Event]) -> Iterator[_Round]:
        """Runs a part; yields each collective for which it has to wait."""
        running: list[list[SimulatedPage]] = []
        for event in events:
            if isinstance(event, Waited):
                round = self._round_of[part, event.number]
                while not round.may_go_on(part):
                    yield round
                self._leave(part, round)
            elif not isinstance(event, Once):
                self._do(part, event, running)
            elif event.number not in self._begun_once:
                self._begun_once.add(event.number)
                yield from self._run(part, event.events)

    def _do(self, part: int, event: Event, running: list[list[SimulatedPage]]) -> None:
        memory, keys = self.memory, self._keys
        if isinstance(event, ByteChange):
            memory.change(*event)
        elif isinstance(event, PagedOperator):
            used = self._begin(part, event) if event.storages else []
            if event.made or event.scratch:
                self._make(part, event)
            memory.end(used, keys(part, event.paged))
        elif isinstance(event, Eviction):
            memory.end([])
        elif isinstance(event, Begun):
            running.append(self._begin(part, event))
        elif isinstance(event, Ran):
            self._make(part, event)
        elif isinstance(event, Ended):
            memory.end(running.pop(), keys(part, event.made))
        elif isinstance(event, Freed):
            left = self._not_freed_by.get(event.storage, 1) - 1
            if event.storage in self._not_freed_by:
                self._not_freed_by[event.storage] = left
            if left <= 0:
                memory.free(*keys(part, (event.storage,)))
        elif isinstance(event, Joined):
            self._join(part, event)
        elif isinstance(event, Released):
            memory.release(*keys(part, (event.storage,)))

    def _begin(self, part: int, event: Begun | PagedOperator) -> list[SimulatedPage]:
        copied = None if event.copied is None else self._keys(part, (event.copied,))[0]
        return self.memory.begin(self._keys(part, event.storages), event.changes, copied)

    def _make(self, part: int, event: Ran | PagedOperator) -> None:
        made = zip(self._keys(part, [each for each, _ in event.made]), [size for _, size in event.made], strict=True)
        self.memory.make(made, event.scratch)

    def _keys(self, part: int, storages: Sequence[int]) -> list[Key]:
        common, first = self._tape.common, part * self._stride
        return [-1 - storage if storage in common else first + storage for storage in storages]

    def _join(self, part: int, event: Joined) -> None:
        beside = self._beside(part, event.axes)
        round = self._rounds.get((event.number, beside))
        if round is None:
            members = self._members.get((event.axes, beside))
            if members is None:
                every = range(len(self._places))
                members = [each for each in every if self._beside(each, event.axes) == beside]
                self._members[event.axes, beside] = members
            are_two = math.prod(self._tape.sizes[axis] for axis in event.axes) == 2
            round = self._rounds[event.number, beside] = _Round(members, are_two)
        self._round_of[part, event.number] = round
        round.turn[part] = len(round.joined)
        round.joined[part] = event
        if event.received is None:
            if len(round.joined) == len(round.members):
                self._compute(round)
            return
        # All parts send over the same distances.
        receivers = {round.member(part, distance) for distance, _ in event.sent}
        senders = {round.member(part, -distance) for distance, _ in event.sent}
        others = [each for each in receivers | senders if each in round.turn and each != part]
        for other in sorted(others, key=round.turn.__getitem__):
            if other in receivers:
                self._give(round, part, other)
            if other in senders:
                self._give(round, other, part)

    def _beside(self, part: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The part's coordinates along the other axes."""
        return tuple(at for axis, at in enumerate(self._places[part]) if axis not in axes)

    def _give(self, round: _Round, source: int, to: int) -> None:
        """Copies the rows that a member sends to another one."""
        copy = round.rows.pop((source, to), None)
        given = self._keys(source, round.joined[source].inputs) if copy is None else [copy]
        self._copied(given, self._keys(to, round.joined[to].outputs))
        if copy is not None:
            self.memory.free(copy)

    def _leave(self, part: int, round: _Round) -> None:
        """Lets a part go on. It may change its tensors then, so rows that are not received yet are copied."""
        if part in round.left:
            return
        round.left.add(part)
        event = round.joined[part]
        for distance, size in event.sent:
            to = round.member(part, distance)
            if to is not None and to not in round.joined:
                copy = round.rows[part, to] = next(self._copies)
                used = self.memory.begin(self._keys(part, event.inputs), False)
                self.memory.make([(copy, size)])
                self.memory.end(used, [copy])

    def _compute(self, round: _Round) -> None:
        """Simulates a collective that is computed for all members at once, when all have joined."""
        events = [(part, round.joined[part]) for part in round.members]
        inputs = [self._keys(part, event.inputs) for part, event in events]
        outputs = [self._keys(part, event.outputs or event.inputs) for part, event in events]
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
        """Simulates adding inputs up one by one, and copying the sum."""
        for given, made in zip(zip(*inputs, strict=True), zip(*outputs, strict=False), strict=False):
            size, total = self._tape.bytes.get(given[0] % self._stride if given[0] >= 0 else -1 - given[0], 0), given[0]
            for each in given[1:]:
                used, sum = self.memory.begin([total, each], False), next(self._copies)
                self.memory.make([(sum, size)])
                self.memory.end(used, [sum])
                if total != given[0]:
                    self.memory.free(total)
                total = sum
            for each in made:
                self._copied([total], [each])
            if total != given[0]:
                self.memory.free(total)

    def _copied(self, given: list[Key], made: list[Key]) -> None:
        self.memory.end(self.memory.begin([*given, *made], True))
