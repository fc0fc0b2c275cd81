"""The parts of a partition: a thread for each, with its own mesh, that computes when the baton comes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from distconv import settings
from distconv.model.gradients import kinds
from distconv.model.parallelize import enable
from distconv.settings.partition import AXES, Kind, Partition
from distconv.tensors.mesh import adopt
from distconv.turns.baton import Baton
from distconv.turns.gradients import SharedBucket
from distconv.turns.group import Meetings
from distconv.turns.heap import Heap, share_one_arena
from distconv.turns.surroundings import Surroundings
from distconv.turns.world import Part, enter, groups_of_parts

T = TypeVar("T")

_numbers = itertools.count(1)

ACCEPTED = ", ".join(axis.name for axis in AXES.values() if axis.kind is not Kind.CHANNELS)


class State(Protocol):
    """What every part has of its own, and is in place while that part runs."""

    def arrive(self, part: int) -> None:
        """Puts a part's in place."""

    def leave(self, part: int) -> None:
        """Keeps a part's, which is in place."""


class Parts:
    """Made by `parts_of`, once for each partition and kind of device."""

    def __init__(self, partition: Partition, device_type: str) -> None:
        self.partition, self.device_type, self.count = partition, device_type, partition.ranks
        self.meshes: list[DeviceMesh] = []
        self._meetings = Meetings()
        self._members = [Part(number, self.count, self._meetings) for number in range(self.count)]
        self._baton = self._meetings.baton = Baton(self.count, self._arrive, self._leave)
        self._states: Sequence[State] = ()
        self._work: Callable[[int], Any] = self._enter
        self._results: list[Any] = []
        self._lock = threading.Lock()
        share_one_arena()
        self._heap = Heap()
        for number in range(self.count):
            threading.Thread(target=self._serve, args=(number,), name=f"part {number}", daemon=True).start()
        self.meshes = self.run(self._enter)

    def run(
        self, work: Callable[[int], T], states: Sequence[State] = (), surroundings: Surroundings | None = None
    ) -> list[T]:
        """What every part gives, when its number is given to ``work`` in its thread. Raises what the first one raises
        that fails; by then all have ended. ``surroundings``: of the caller, by default now.
        """
        surroundings = surroundings or Surroundings.now(self.device_type)

        def within(number: int) -> T:
            return surroundings.run(lambda: work(number))

        with self._lock, groups_of_parts(), settings.options({"check": "off"}):
            self._work, self._states, self._results = within, states, [None] * self.count
            try:
                self._baton.run()
                return self._results
            except BaseException:
                self._meetings.forget()
                for group in itertools.chain.from_iterable(member.groups for member in self._members):
                    group.restart()
                raise
            finally:
                self._work, self._states, self._results = self._enter, (), []
                self._heap.settle()

    @property
    def moved(self) -> int:
        """The bytes that parts have got from each other so far."""
        return self._meetings.moved

    def _serve(self, number: int) -> None:
        """What a thread does: a part's work, whenever the baton comes for the first time in a run."""
        while True:
            self._baton.start(number)
            error: BaseException | None = None
            try:
                if self._baton.failure is None:
                    self._results[number] = self._work(number)
            except BaseException as raised:
                error = raised
            self._baton.end(number, error)
            del error

    def _enter(self, number: int) -> DeviceMesh:
        if self.device_type == "cuda":
            torch.cuda.init()  # else a mesh would choose the device, another one for every part
        enter(self._members[number])
        ranks = torch.arange(self.count, device="cpu").view(self.partition.sizes)
        mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=self.partition.names)
        # Plans are kept by their meshes, which otherwise are equal on all ranks.
        mesh._thread_id = next(_numbers)
        vars(mesh).pop("_hash", None)  # which it keeps
        enable(adopt(mesh))
        kinds[mesh] = SharedBucket
        return mesh

    def _arrive(self, number: int) -> None:
        for state in self._states:
            state.arrive(number)

    def _leave(self, number: int) -> None:
        for state in reversed(self._states):
            state.leave(number)
        self._heap.tidy()


_parts: dict[tuple[int, Partition, str], Parts] = {}
"""By the process, too: a process that is forked off has none of the threads."""


def read(text: str | Partition) -> Partition:
    """The partition of parts in turn. ValueError, one line, where one process cannot compute them in turn."""
    partition = text if isinstance(text, Partition) else Partition.parse(text)
    unknown = [name for name in partition.names if AXES[name].kind is Kind.CHANNELS]
    if unknown:
        raise ValueError(
            f"parts {str(partition)!r}: the axis {unknown[0]!r} would cut parameters, which parts in turn share;"
            f" accepted: axis=parts,... with axes {ACCEPTED}"
        )
    return partition


def parts_of(partition: Partition, device_type: str) -> Parts:
    """Those of a partition, in this process."""
    key = os.getpid(), partition, device_type
    if key not in _parts:
        _parts[key] = Parts(partition, device_type)
    return _parts[key]
