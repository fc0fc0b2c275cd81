"""The parts of a partition: each is a rank to torch.distributed, in a thread that computes while it has the baton.

In a job of ranks, each rank has such parts, and all parts of all ranks are members of one mesh.

Torch keeps a workspace of cuBLAS, 32 MiB on an H100, for every thread and stream that multiplies matrices. As one of
the threads runs at a time, one workspace is enough for all of them.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import itertools
import multiprocessing.connection
import os
import queue
import resource
import selectors
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.parallelize import enable
from distconv.model.parameters import partition_of
from distconv.rules.operands import once
from distconv.settings.partition import Partition, numbers, together
from distconv.tensors import hooks
from distconv.tensors.gathering.memory import maps_are_limited
from distconv.tensors.mesh import adopt, uncompared
from distconv.tensors.read_parts import thread
from distconv.tensors.replacements import when_put_back
from distconv.turns import baton
from distconv.turns.baton import Baton
from distconv.turns.gradients import SharedBucket
from distconv.turns.group import PendingCollectives
from distconv.turns.heap import Heap, share_one_arena
from distconv.turns.mail import Mail
from distconv.turns.surroundings import Surroundings
from distconv.turns.world import PartWorld, enter_part, meshes, register_groups
from mucudnn.process import renewed

T = TypeVar("T")

_numbers = itertools.count(1)

SMALL_STACK = 2 << 20  # Bytes of a part's stack, where memory is limited; by default a thread maps 8 MiB.

OPENMP_STACK = "OMP_STACKSIZE"  # The variable for the stacks of OpenMP's threads; it is read when torch is imported.


class PartState(Protocol):
    """State of the process of which every part has its own, such as random numbers: it is exchanged at every turn."""

    def arrive(self, part: int | None) -> None:
        """Puts the state of a part in place; None: that of the caller."""

    def leave(self, part: int) -> None:
        """Keeps the state that is in place as that of a part. It stays in place until another one arrives."""


class Parts:
    """Made by `parts_of`, once for each partition and kind of device.

    Args:
        ranks: the mesh of the ranks of a job, each of which has such parts; None: there is this process alone.
        imagined: without ``ranks``, the partition of ranks of which only one exists, to be followed; its parts are
            numbered from ``member`` on.
        adds_gradients: whether parts add up gradients of parameters in memory; else by messages, as ranks do.
        pending: the object that keeps the collectives; by default one is made.

    Attributes:
        count: the number of parts in this process.
        mail: by which the ranks exchange tensors of their parts.
        pending: the collectives of the parts here; it counts the bytes that parts receive and send.
        meshes: the mesh of each part here. All have the same members.
    """

    def __init__(
        self,
        partition: Partition,
        device_type: str,
        ranks: DeviceMesh | None,
        imagined: Partition | None,
        adds_gradients: bool = True,
        pending: PendingCollectives | None = None,
        member: int = 0,
    ) -> None:
        self.partition, self.device_type, self.count, self.ranks = partition, device_type, partition.ranks, ranks
        self.meshes: list[DeviceMesh] = []
        self._adds_gradients = adds_gradients
        self.mail = None if ranks is None else Mail(ranks)
        self._outer = (imagined or Partition(())) if ranks is None else partition_of(ranks)
        self.pending = pending or PendingCollectives(self.mail)
        first = member if self.mail is None else self.mail.rank * self.count
        self._members = [
            PartWorld(first + number, self._outer.ranks * self.count, self.pending, (first, self.count))
            for number in range(self.count)
        ]
        outside = None if self.mail is None else self.pending.exchange
        self._baton = self.pending.baton = Baton(self.count, self._arrive, self._leave, outside)
        self._shared = once.Shared(self.count)
        self._states: Sequence[PartState] = ()
        self._work: Callable[[int], Any] = self._enter
        self._releases = False
        self._results: list[Any] = []
        self._lock = renewed(threading.Lock())
        share_one_arena()
        self._heap = Heap()
        with _stacks():
            for number in range(self.count):
                threading.Thread(target=self._serve, args=(number,), name=f"part {number}", daemon=True).start()
        self.meshes = self.run(self._enter)

    def run(
        self, work: Callable[[int], T], states: Sequence[PartState] = (), surroundings: Surroundings | None = None
    ) -> list[T]:
        """Calls ``work`` with the number of every part here, in that part's thread, and returns the results.

        If a part fails, all parts end, also those of other ranks, and every rank raises the error of the first one that
        failed. Collective over the ranks. ``surroundings``: those of the caller, by default as they are now.
        """
        surroundings = surroundings or Surroundings.now(self.device_type)

        def within(number: int) -> T:
            return surroundings.run(lambda: work(number))

        with self._lock:
            register_groups(self._members)
            self._work, self._states, self._results = within, states, [None] * self.count
            self._shared.begin()
            self._heap.begin()
            self._releases = workspaces_may_be_released(self.device_type)
            try:
                self._baton.run()
                return self._results
            except BaseException:
                self.pending.forget()
                for group in itertools.chain.from_iterable(member.groups for member in self._members):
                    group.restart()
                raise
            finally:
                self._work, self._states, self._results = self._enter, (), []
                self._heap.settle()

    def _serve(self, number: int) -> None:
        """The loop of a part's thread: does the part's work, whenever the baton first comes in a run."""
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
        enter_part(self._members[number])
        once.thread.shared, once.thread.part = self._shared, number
        partition = together(self._outer, self.partition)
        members = torch.tensor(numbers(self._outer, self.partition), device="cpu").view(partition.sizes)
        mesh = DeviceMesh(self.device_type, members, mesh_dim_names=partition.names)
        # Plans are kept by their meshes, which otherwise are equal on all ranks.
        mesh._thread_id = thread.part = next(_numbers)
        meshes.add(mesh._thread_id)
        vars(mesh).pop("_hash", None)  # computed before the line above
        uncompared.add(adopt(mesh))
        enable(mesh)
        if self._adds_gradients:
            hooks.bucket_classes[mesh] = SharedBucket
        return mesh

    def _arrive(self, number: int | None) -> None:
        for state in self._states:
            state.arrive(number)

    def _leave(self, number: int) -> None:
        for state in reversed(self._states):
            state.leave(number)
        if self.device_type == "cpu":
            self._heap.tidy()
        if self._releases:
            release_workspaces()


def stacks_of(parts: Partition, device_type: str) -> int:
    """Bytes of the stacks of the parts' threads, each of which has OpenMP threads of its own; 0 unless the memory that
    the process may map is limited."""
    if device_type != "cpu" or not maps_are_limited():
        return 0
    of_system = resource.getrlimit(resource.RLIMIT_STACK)[0]
    of_worker = SMALL_STACK if os.environ.get(OPENMP_STACK) or not 0 < of_system < 1 << 30 else of_system
    return parts.ranks * (SMALL_STACK + (torch.get_num_threads() - 1) * of_worker)


@contextlib.contextmanager
def _stacks() -> Iterator[None]:
    """A context in which threads start with small stacks, if the memory that the process may map is limited."""
    before = threading.stack_size(SMALL_STACK) if maps_are_limited() else None
    try:
        yield
    finally:
        if before is not None:
            threading.stack_size(before)


_parts: dict[tuple[object, ...], Parts] = {}
"""The parts of each partition. The key has the process, as a forked one has none of the threads."""


def parts_of(
    partition: Partition,
    device_type: str,
    ranks: DeviceMesh | None = None,
    imagined: Partition | None = None,
    adds_gradients: bool = True,
) -> Parts:
    """The parts of a partition in this process, or in every rank of a mesh; collective over its ranks. Arguments: as of
    `Parts`."""
    key = os.getpid(), partition, device_type, ranks, imagined, adds_gradients
    if key not in _parts:
        _parts[key] = Parts(partition, device_type, ranks, imagined, adds_gradients)
        when_put_back(lambda: _parts.pop(key, None))
    return _parts[key]


_WAITS = {
    each.__file__
    for each in (concurrent.futures.thread, multiprocessing.connection, queue, selectors, threading, baton)
}
"""The files in which threads wait for each other, and compute nothing."""


def workspaces_may_be_released(device_type: str) -> bool:
    """Whether workspaces may be released now: a CUDA graph that the program has captured may go on using its own.

    Such a graph has a memory pool of its own.
    """
    if device_type != "cuda" or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return False
    return all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot())


def release_workspaces() -> None:
    """Gives cuBLAS's workspaces back to torch's allocator; the next product takes one, in the order of its stream.

    Not while another thread computes something: it may be about to use its own.
    """
    own = threading.get_ident()
    if all(frame.f_code.co_filename in _WAITS for at, frame in sys._current_frames().items() if at != own):
        torch._C._cuda_clearCublasWorkspaces()
