"""The process group: torch.distributed's collectives over one MPI communicator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from distconv.mpi.backend import BACKEND, mpi_lock
from distconv.mpi.staging import (
    MpiReduction,
    contiguous_memory,
    copy_back,
    deal,
    divide,
    message,
    own_tensors,
    packed_bytes,
    readable,
    readable_beside,
    room_for,
    sizes,
    writable,
)
from distconv.mpi.work import MPIWork, progress
from distconv.mpi.world import WORLD

_ProcessGroup: Any = dist.ProcessGroup  # its overloads are for callers


class MPIProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """torch.distributed's collectives over one MPI communicator, which it owns."""

    def __init__(self, communicator: MPI.Intracomm, name: str, timeout: timedelta, members: Sequence[int]) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._communicator, self._name, self._timeout = communicator, name, timeout
        self._members = members
        self._size, self._rank = communicator.size, communicator.rank

    def size(self) -> int:
        return int(self._size)

    def rank(self) -> int:
        return int(self._rank)

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        """For all devices it is the group itself; torch 2.15 asks before it sends batched messages."""
        return self

    def shutdown(self) -> None:
        """Completes what is in flight and frees the communicator. Collective."""
        progress.finish()
        with mpi_lock:
            if self._communicator != MPI.COMM_NULL and not MPI.Is_finalized():
                self._communicator.Free()

    def abort(self) -> None:
        self._communicator.Abort(1)

    def _work(
        self,
        requests: list[MPI.Request],
        outputs: list[Tensor],
        keep: Sequence[Tensor] = (),
        finish: Sequence[Callable[[], None] | None] = (),
        options: Any = None,
    ) -> MPIWork:
        work = MPIWork(requests, outputs, (*outputs, *keep), finish, self._timeout, self._members)
        if getattr(options, "asyncOp", True):
            progress.drive(work)
        return work

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        opts = opts or dist.AllreduceOptions()
        tensors = own_tensors(tensors)
        plans = [MpiReduction(tensor.dtype, opts.reduceOp, self._size) for tensor in tensors]
        buffers = [readable(tensor, plan.dtype) for plan, tensor in zip(plans, tensors, strict=True)]
        with mpi_lock:
            requests = [
                self._communicator.Iallreduce(MPI.IN_PLACE, plan.message(buffer), plan.operation)
                for plan, buffer in zip(plans, buffers, strict=True)
            ]
        finish = divide(plans, buffers), copy_back(zip(tensors, buffers, strict=True))
        return self._work(requests, tensors, buffers, finish, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        plan = MpiReduction(tensor.dtype, opts.reduceOp, self._size)
        buffer = readable(tensor, plan.dtype)
        if self._rank == opts.rootRank:
            messages: tuple[Any, Any] = MPI.IN_PLACE, plan.message(buffer)
            finish = [divide([plan], [buffer]), copy_back([(tensor, buffer)])]
        else:
            messages, finish = (plan.message(buffer), None), []
        with mpi_lock:
            request = self._communicator.Ireduce(*messages, plan.operation, opts.rootRank)
        return self._work([request], tensors, [buffer], finish, opts)

    def _reduce_scatter(
        self, outputs: list[Tensor], sources: list[Tensor], counts: list[list[int]], opts: Any
    ) -> MPIWork:
        plans = [MpiReduction(output.dtype, opts.reduceOp, self._size) for output in outputs]
        read = [
            readable_beside(*each, plan.dtype)
            for plan, each in zip(plans, zip(sources, outputs, strict=True), strict=True)
        ]
        written = [writable(output, plan.dtype) for plan, output in zip(plans, outputs, strict=True)]
        with mpi_lock:
            requests = [
                self._communicator.Ireduce_scatter(plan.message(source), plan.message(into), count, plan.operation)
                for plan, source, into, count in zip(plans, read, written, counts, strict=True)
            ]
        finish = divide(plans, written), copy_back(zip(outputs, written, strict=True))
        return self._work(requests, outputs, [*read, *written], finish, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MPIWork:
        flat = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in inputs]
        counts = [[part.numel() for part in parts] for parts in inputs]
        return self._reduce_scatter(outputs, flat, counts, opts or dist.ReduceScatterOptions())

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> MPIWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        for output, source in zip(outputs, inputs, strict=True):
            _check_flat("reduce_scatter_single", output.numel() * self._size, source.numel())
        counts = [[output.numel()] * self._size for output in outputs]
        return self._reduce_scatter(outputs, inputs, counts, opts or dist.ReduceScatterOptions())

    # Movement.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MPIWork:
        opts = opts or dist.BroadcastOptions()
        (tensor,) = own_tensors(tensors)
        sends = self._rank == opts.rootRank
        buffer = readable(tensor) if sends else writable(tensor)
        with mpi_lock:
            request = self._communicator.Ibcast(message(buffer), opts.rootRank)
        finish = [] if sends else [copy_back([(tensor, buffer)])]
        return self._work([request], tensors, [buffer], finish, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        (parts,), (source,) = outputs, inputs
        read = readable(source)
        room = room_for(parts)
        with mpi_lock:
            request = self._communicator.Iallgatherv(message(read), message(room, sizes(parts)))
        return self._work([request], parts, [read, room], [deal(room, parts)], opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> MPIWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        for output, source in zip(outputs, inputs, strict=True):
            _check_flat("all_gather_single", source.numel() * self._size, output.numel())
        read = [readable_beside(source, output) for source, output in zip(inputs, outputs, strict=True)]
        written = [writable(output) for output in outputs]
        with mpi_lock:
            requests = [
                self._communicator.Iallgather(message(source), [contiguous_memory(into), source.nbytes, MPI.BYTE])
                for source, into in zip(read, written, strict=True)
            ]
        finish = [copy_back(zip(outputs, written, strict=True))]
        return self._work(requests, outputs, [*read, *written], finish, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        opts = opts or dist.GatherOptions()
        (source,) = inputs
        parts = outputs[0] if self._rank == opts.rootRank else []
        read, room = readable(source), room_for(parts)
        received = message(room, sizes(parts)) if parts else None
        with mpi_lock:
            request = self._communicator.Igatherv(message(read), received, opts.rootRank)
        return self._work([request], parts, [read, room], [deal(room, parts)], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MPIWork:
        opts = opts or dist.ScatterOptions()
        (output,) = outputs
        into = writable(output)
        keep, sent = [into], None
        if self._rank == opts.rootRank:
            (parts,) = inputs
            keep.append(packed_bytes(parts))
            sent = message(keep[-1], sizes(parts))
        with mpi_lock:
            request = self._communicator.Iscatterv(sent, message(into), opts.rootRank)
        return self._work([request], outputs, keep, [copy_back([(output, into)])], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> MPIWork:
        read, into = readable(source), writable(output)
        sends = _split_bytes(source, input_split_sizes, self._size)
        receives = _split_bytes(output, output_split_sizes, self._size)
        with mpi_lock:
            request = self._communicator.Ialltoallv(message(read, sends), message(into, receives))
        return self._work([request], [output], [read, into], [copy_back([(output, into)])], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MPIWork:
        read, room = packed_bytes(inputs), room_for(outputs)
        with mpi_lock:
            request = self._communicator.Ialltoallv(message(read, sizes(inputs)), message(room, sizes(outputs)))
        return self._work([request], outputs, [read, room], [deal(room, outputs)], opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MPIWork:
        (tensor,) = tensors
        read = readable(tensor)
        with mpi_lock:
            request = self._communicator.Isend(message(read), dst, tag)
        return self._work([request], tensors, [read])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MPIWork:
        (tensor,) = tensors
        into = writable(tensor)
        with mpi_lock:
            request = self._communicator.Irecv(message(into), src, tag)
        return self._work([request], tensors, [into], [copy_back([(tensor, into)])])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MPIWork:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, opts: Any = None) -> MPIWork:
        with mpi_lock:
            request = self._communicator.Ibarrier()
        return self._work([request], [], options=opts)

    # The names of these collectives before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _check_flat(name: str, expected: int, actual: int) -> None:
    if expected != actual:
        raise ValueError(f"{BACKEND}: {name}: the larger tensor has {actual} elements, not {expected}")


def _split_bytes(tensor: Tensor, rows: Sequence[int] | None, size: int) -> list[int]:
    length = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if length % size:
            raise ValueError(f"{BACKEND}: all_to_all_single: {length} rows do not split into {size} equal parts")
        return [tensor.nbytes // size] * size
    if len(rows) != size or sum(rows) != length:
        raise ValueError(f"{BACKEND}: all_to_all_single: split sizes {list(rows)} for {length} rows on {size} ranks")
    row = tensor.nbytes // length if length else 0
    return [count * row for count in rows]


def create(options: Any, _: Any) -> MPIProcessGroup:
    """Called on the members of a group, in the order in which each makes its groups."""
    world = WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if ranks[options.group_rank] != world.rank or max(ranks) >= world.size:
        raise ValueError(
            f"{BACKEND}: rank {ranks[options.group_rank]} of torch.distributed is rank {world.rank} of MPI's "
            f"{world.size}; start with distconv.mpi.init_process_group()"
        )
    tag = zlib.crc32(options.group_id.encode()) % 32768  # the least upper bound of tags that MPI promises
    with mpi_lock:
        communicator = world.Create_group(world.group.Incl(ranks), tag)
    return MPIProcessGroup(communicator, options.group_id, options.timeout, ranks)
