"""Follows one part of a call by the shapes of its tensors, and foresees from it what all parts take in turn."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv import settings
from distconv.rules.operands import once
from distconv.settings.partition import Partition
from distconv.settings.parts import together
from distconv.tensors.memory import TensorMemory
from distconv.transfer.tracing import shapes_followed
from distconv.turns.call import call_in_turn
from distconv.turns.collectives import CollectiveArguments
from distconv.turns.following import (
    Followed,
    FollowingPager,
    backward_of_sum,
    follow_call,
    operations_of,
    shapes_uncounted,
    without_numbers,
)
from distconv.turns.group import Key, PendingCollectives
from distconv.turns.module_state import ModuleState
from distconv.turns.pager import instead
from distconv.turns.pages import Page, Paged
from distconv.turns.parts import Parts, PartState
from distconv.turns.reach import Reach
from distconv.turns.rounds import Round, RowsRound
from distconv.turns.scratch import scratch_bytes
from distconv.turns.shapes_only import ShapesOnly, fake_tensors
from distconv.turns.simulation import Deadlock, simulate
from distconv.turns.surroundings import Surroundings
from distconv.turns.tape import LEAST, Begun, Ended, Event, Freed, Joined, Once, Ran, Released, Section, Tape, Waited

T = TypeVar("T")

MIDDLE = 1  # The part along each axis that is followed: it has a neighbour on either side, where there are three.


def parts_within(
    module: nn.Module, args: Any, kwargs: Any, partition: Partition, backward: bool, ranks: Partition | None = None
) -> Callable[[int], Followed]:
    """Follows a call; returns what gives what its parts take within a limit of their tensors, in bytes.

    One part is followed for all of them. All are where layers compute in chains, which differ among parts, and where
    what one part does does not tell what the others do. Arguments and errors: as of `record_part`.
    """
    tape = None
    if not settings.value("halo"):
        with contextlib.suppress(NotImplementedError):
            tape = record_part(module, args, kwargs, partition, backward, ranks)

    def taken(memory: int) -> Followed:
        if tape is not None:
            with contextlib.suppress(Deadlock):
                return foreseen(tape, memory)
        return follow_call(module, args, kwargs, partition, memory, backward, ranks)

    return taken


def foreseen(tape: Tape, memory: int) -> Followed:
    """What the parts of a tape take within a limit of their tensors."""
    taken, parts = simulate(tape, memory), math.prod(tape.parts)
    return Followed(
        taken.peak,
        tape.whole,
        tape.results,
        taken.spilled,
        taken.fetched,
        parts * tape.exchanged,
        parts * tape.sent,
        parts * tape.operations + tape.operations_once,
        taken.with_scratch,
    )


def record_part(
    module: nn.Module, args: Any, kwargs: Any, partition: Partition, backward: bool, ranks: Partition | None = None
) -> Tape:
    """Follows one part of a call, with the backward of the sum of its results if asked for. The module stays as it is.

    ``ranks``: all having such parts, of which a part of the first is followed. Raises what the call raises, and
    NotImplementedError where a group of parts is no slice of the mesh.
    """
    mesh = together(ranks or Partition(()), partition)
    sizes = dict(partition.axes)
    tape = Tape(mesh.sizes, tuple(sizes.get(name, 1) for name in mesh.names))
    part = _one_part_of(mesh, tape.parts, os.getpid())
    shapes = ShapesOnly()
    copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
    tape.copied = _copied_state(copied, shapes)
    recorder = Recorder(tape, known)
    part.record_with(recorder)
    shapes.seen = recorder.see
    with shapes_uncounted(recorder.of_thread), instead(recorder), shapes_followed(), shapes:
        y = call_in_turn(part, 1 << 62, copied, args, kwargs)
        if backward:
            backward_of_sum(y)
    storages = [x.untyped_storage() for x in tree_leaves(y) if isinstance(x, Tensor)]
    tape.results = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    tape.exchanged, tape.sent = part.pending.moved, part.pending.sent
    recorder.finish()
    return tape


def _copied_state(module: nn.Module, shapes: ShapesOnly) -> int:
    """The bytes of a module's state that each part but the first has a copy of."""
    reach, memory = Reach(module), TensorMemory()
    shared = {id(x) for _, x in (*reach.parameters, *reach.constant)}
    shapes.seen = lambda func, args, kwargs, result: memory.count(fake_tensors((result,)))
    with shapes:
        state = ModuleState(reach, 2, lambda x: id(x) in shared, lambda part, x: x)
    taken = memory.now
    del state
    return taken


@functools.lru_cache(maxsize=None)
def _one_part_of(mesh: Partition, parts: tuple[int, ...], process: int) -> _OnePart:
    at = [MIDDLE if size > 1 and total > 2 else 0 for size, total in zip(parts, mesh.sizes, strict=True)]
    return _OnePart(mesh, int(np.ravel_multi_index(at, mesh.sizes)) if at else 0)


class Recorder(FollowingPager):
    """Sees all that one part does to memory; nothing leaves the device meanwhile."""

    def __init__(self, tape: Tape, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._tape = tape
        self._numbers = {x.untyped_storage()._cdata: -1 for x in known}  # Of storages that are alive, by address.
        self._is_quiet, self._once = False, False
        self._collectives = self._onces = 0
        tape.whole = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in known}.values())
        self.begin_section(of_parts=False)

    def begin_section(self, of_parts: bool) -> None:
        """What follows is done by each part, or by the caller."""
        self._events: list[Event] = []
        self._tape.sections.append(Section(of_parts, self._events))

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, Page], call: Paged) -> None:
        if self.propagates or self._is_quiet:
            return
        made = []
        for x in results:
            storage = x.untyped_storage()
            number = self._numbers.get(storage._cdata, -1)
            if storage._cdata not in given and number >= 0 and storage.nbytes() >= LEAST and self._may_leave(storage):
                made.append(number)
        self._events.append(Ended(tuple(made)))

    def begin(self, keys: Iterable[int], changes: bool, call: Paged) -> dict[int, Page]:
        if not self.propagates and not self._is_quiet:
            self._events.append(Begun(self._known(keys), changes))
        return {}

    def release(self, x: Tensor) -> None:
        self._events += [Released(number) for number in self._known([x.untyped_storage()._cdata])]

    def release_all(self, call: Paged) -> None:
        self._events += [Released(number) for number in sorted({*self._numbers.values()}) if number >= 0]

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has made a result."""
        if self.propagates or self._is_quiet:
            return
        results = [x for x in fake_tensors((result,)) if x.fake_device.type != "meta"]
        made = [number for x in results if (number := self._make(x)) is not None]
        scratch = scratch_bytes(func, args, results)
        if made or scratch:
            self._events.append(Ran(tuple((number, self._tape.bytes[number]) for number in made), scratch))
        operations = operations_of(func, args, kwargs, result)
        if self._once:
            self._tape.operations_once += operations
        else:
            self._tape.operations += operations

    def once(self, compute: Callable[[], once.Made]) -> once.Made:
        """What is computed once for all parts, each of which has a copy."""
        outer, self._events = self._events, []
        is_inner, self._once = self._once, True
        try:
            made = compute()
        finally:
            outer.append(Once(self._onces, self._events))
            self._onces += 1
            self._events, self._once = outer, is_inner
        return tree_map_only(Tensor, lambda x: x.clone(memory_format=torch.preserve_format), made)

    def joined(self, group: Key, name: str, at: int, given: CollectiveArguments) -> int:
        """The part joins a collective of a group, whose number is returned."""
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
        self._events.append(Joined(self._collectives, name, axes, inputs, outputs, sent, received))
        self._collectives += 1
        return self._collectives - 1

    def waited(self, number: int) -> None:
        """The part goes on behind a collective."""
        self._events.append(Waited(number))

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """A context of what the simulation does by itself."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def finish(self) -> None:
        """The call is over: what is left of it, all parts have together."""
        self._tape.common.update(number for number in self._numbers.values() if number >= 0)

    def _axes_of(self, members: Sequence[int]) -> tuple[int, ...]:
        places = np.unravel_index(np.asarray(members), self._tape.sizes)
        axes = tuple(axis for axis, of_axis in enumerate(places) if len({*of_axis.tolist()}) > 1)
        if math.prod(self._tape.sizes[axis] for axis in axes) != len(members):
            raise NotImplementedError("a group of parts that is no slice of the mesh")
        return axes

    def _known(self, addresses: Iterable[int]) -> tuple[int, ...]:
        found = dict.fromkeys(self._numbers.get(address, -1) for address in addresses)
        return tuple(number for number in found if number >= 0)

    def _make(self, x: Tensor) -> int | None:
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return None
        number = self._numbers[address] = len(self._tape.bytes)
        self._tape.bytes[number] = storage.nbytes()
        if self._once:
            self._tape.common.add(number)
        weakref.finalize(storage, self._is_freed, address, number).atexit = False
        return number

    def _is_freed(self, address: int, number: int) -> None:
        if self._numbers.pop(address, None) is not None:
            self._events.append(Freed(number))


class _OnePart(Parts):
    """A part that is followed, as a member of a mesh whose others are imagined."""

    def __init__(self, mesh: Partition, member: int) -> None:
        self._recorder: Recorder | None = None
        super().__init__(Partition(()), "cpu", None, mesh, pending=_Noted(self), member=member)

    @property
    def recorder(self) -> Recorder | None:
        """What sees the part; None: nothing does."""
        return self._recorder

    def record_with(self, recorder: Recorder) -> None:
        """Lets a recorder see the part's next call."""
        self._recorder = recorder
        self.pending.moved = self.pending.sent = 0

    def run(
        self, work: Callable[[int], T], states: Sequence[PartState] = (), surroundings: Surroundings | None = None
    ) -> list[T]:
        recorder = self._recorder
        if recorder is None:
            return super().run(work, states, surroundings)

        def recorded(part: int) -> T:
            once.thread.compute = recorder.once
            return work(part)

        recorder.begin_section(of_parts=True)
        try:
            return super().run(recorded, states, surroundings)
        finally:
            recorder.begin_section(of_parts=False)


class _Noted(PendingCollectives):
    """Collectives that a recorder notes."""

    def __init__(self, part: _OnePart) -> None:
        super().__init__()
        self._part = part

    def join(self, group: Key, number: int, round: Round, at: int, given: CollectiveArguments) -> Round:
        recorder = self._part.recorder
        if recorder is None:
            return super().join(group, number, round, at, given)
        noted = recorder.joined(group, round.name, at, given)
        with recorder.quiet():
            return _NotedRound(super().join(group, number, round, at, given), recorder, noted)


class _NotedRound:
    """A collective that is over at once, as all other members are imagined."""

    def __init__(self, round: Round, recorder: Recorder, number: int) -> None:
        self.name, self._round, self._recorder, self._number = round.name, round, recorder, number

    def join(self, at: int, given: CollectiveArguments) -> int:
        return self._round.join(at, given)

    def receive(self, at: int, to: int, tensors: Sequence[Tensor]) -> None:
        self._round.receive(at, to, tensors)

    def serves(self, at: int) -> bool:
        return self._round.serves(at)

    def leave(self, at: int) -> int:
        self._recorder.waited(self._number)
        with self._recorder.quiet():
            return self._round.leave(at)

    def is_complete(self) -> bool:
        return self._round.is_complete()
