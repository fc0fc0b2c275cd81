"""Follows one part of a call by the shapes of its tensors, and predicts from it the memory that all parts take."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv import settings
from distconv.rules.operands import once
from distconv.settings.partition import Partition, together
from distconv.tensors.memory import TensorMemory, shapes_uncounted
from distconv.tensors.replacements import when_put_back
from distconv.transfer.tracing import shapes_followed
from distconv.turns.call import call_in_turn
from distconv.turns.collectives import CollectiveArguments
from distconv.turns.copied_models import drop_gradients, without_numbers
from distconv.turns.following import backward_of_sum, follow_call
from distconv.turns.group import Key, PendingCollectives
from distconv.turns.module_state import ModuleState
from distconv.turns.pager import pager_replaced
from distconv.turns.part_recorder import NoSlice, PartRecorder
from distconv.turns.parts import Parts, PartState
from distconv.turns.reach import Reach
from distconv.turns.rounds import Round
from distconv.turns.shapes_only import ShapesOnly, fake_tensors
from distconv.turns.simulation import simulate
from distconv.turns.surroundings import Surroundings
from distconv.turns.tape import Tape
from distconv.turns.work import Followed
from mucudnn.process import renewed

T = TypeVar("T")

MIDDLE = 1  # The part along each axis that is followed: it has a neighbour on either side, where there are three.


def parts_within(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    partition: Partition,
    backward: bool,
    ranks: Partition | None = None,
    call: Callable[..., Any] | None = None,
) -> Callable[[int], Followed]:
    """Follows a call. Returns a function that predicts what its parts take within a limit of their tensors, in bytes.

    One part is followed for all of them. But all parts are followed where layers compute in chains, which differ among
    parts, and where a group of parts is no slice of the mesh. Arguments and errors: as of `record_part`.
    """
    if not settings.value("halo"):
        with contextlib.suppress(NoSlice):
            tape = record_part(module, args, kwargs, partition, backward, ranks, call)
            return functools.partial(simulate, tape)
    return lambda memory: follow_call(module, args, kwargs, partition, memory, backward, ranks, call=call)


def record_part(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    partition: Partition,
    backward: bool,
    ranks: Partition | None = None,
    call: Callable[..., Any] | None = None,
) -> Tape:
    """Follows one part of a call, with the backward of the sum of its results if asked for. The module stays as it is.

    ``ranks``: a partition of ranks, each of which has such parts: a part of the first rank is followed. ``call``: as of
    `call_in_turn`. Raises what the call raises, and `NoSlice`.
    """
    mesh = together(ranks or Partition(()), partition)
    sizes = dict(partition.axes)
    tape = Tape(mesh.sizes, tuple(sizes.get(name, 1) for name in mesh.names))
    part = _one_part_of(mesh, tape.parts, os.getpid())
    shapes = ShapesOnly()
    copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
    drop_gradients(copied)
    tape.copied = _copied_state(copied, known, shapes)
    recorder = PartRecorder(tape, known)
    shapes.seen = recorder.see
    uncounted = shapes_uncounted(recorder.of_thread)
    with part.recorded_by(recorder), uncounted, pager_replaced(recorder), shapes_followed(), shapes:
        y = call_in_turn(part, 1 << 62, copied, args, kwargs, call=call)
        recorder.begin_section(of_parts=False)
        tape.forward = len(tape.sections) - 1
        if backward:
            backward_of_sum(y)
    storages = [x.untyped_storage() for x in tree_leaves(y) if isinstance(x, Tensor)]
    tape.results = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    recorder.finish()
    return tape


def _copied_state(module: nn.Module, known: Sequence[Tensor], shapes: ShapesOnly) -> int:
    """The bytes of a module's state of which each part but the first has a copy."""
    reach, memory = Reach(module), TensorMemory()
    memory.count(known)
    before = memory.now
    shared = {id(x) for _, x in (*reach.parameters, *reach.constant)}
    shapes.seen = lambda func, args, kwargs, result: memory.count(fake_tensors((result,)))
    with shapes:
        state = ModuleState(reach, 2, lambda x: id(x) in shared, lambda part, x: x)
    taken = memory.now - before
    del state
    return taken


@functools.lru_cache(maxsize=64)
def _one_part_of(mesh: Partition, parts: tuple[int, ...], process: int) -> _OnePart:
    when_put_back(_one_part_of.cache_clear)
    at = [MIDDLE if size > 1 and total > 2 else 0 for size, total in zip(parts, mesh.sizes, strict=True)]
    return _OnePart(mesh, int(np.ravel_multi_index(at, mesh.sizes)) if at else 0)


class _OnePart(Parts):
    """A part that is followed, as a member of a mesh whose other members are imagined."""

    def __init__(self, mesh: Partition, member: int) -> None:
        self.recorder: PartRecorder | None = None
        self._one_at_a_time = renewed(threading.Lock())
        super().__init__(Partition(()), "cpu", None, mesh, pending=_RecordedCollectives(self), member=member)

    @contextlib.contextmanager
    def recorded_by(self, recorder: PartRecorder) -> Iterator[None]:
        """A context in which the part is recorded; other threads that record one wait."""
        with self._one_at_a_time:
            self.recorder, before = recorder, self.pending.moved
            try:
                yield
            finally:
                self.recorder = None
                recorder.tape.exchanged = self.pending.moved - before

    def run(
        self, work: Callable[[int], T], states: Sequence[PartState] = (), surroundings: Surroundings | None = None
    ) -> list[T]:
        recorder = self.recorder
        if recorder is None:
            return super().run(work, states, surroundings)

        def recorded(part: int) -> T:
            once.thread.records = recorder.once
            return work(part)

        recorder.begin_section(of_parts=True)
        try:
            return super().run(recorded, states, surroundings)
        finally:
            recorder.begin_section(of_parts=False)


class _RecordedCollectives(PendingCollectives):
    """The collectives of a part that is recorded."""

    def __init__(self, part: _OnePart) -> None:
        super().__init__()
        self._part = part

    def join(self, group: Key, number: int, round: Round, at: int, given: CollectiveArguments) -> Round:
        recorder = self._part.recorder
        if recorder is None:
            return super().join(group, number, round, at, given)
        noted = recorder.joined(group, round.name, at, given)
        with recorder.quiet():
            made: Any = _RecordedRound(super().join(group, number, round, at, given), recorder, noted)
        return made


class _RecordedRound:
    """A collective that is over at once, as all other members are imagined."""

    def __init__(self, round: Round, recorder: PartRecorder, number: int) -> None:
        self._round, self._recorder, self._number = round, recorder, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def leave(self, at: int) -> int:
        self._recorder.waited(self._number)
        with self._recorder.quiet():
            return self._round.leave(at)
