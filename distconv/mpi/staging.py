"""Staging: MPI uses a tensor in place where it can address it, else through a contiguous, pinned host copy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from distconv.mpi.world import WORLD


def _knows_cuda() -> bool:
    """Whether this MPI can address CUDA memory: MPI 4.1's info key, else the extension of Open MPI and MPICH."""
    kinds = WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return any(kind.split(":")[0] == "cuda" for kind in kinds.split(","))
    for library in (MPI.__file__, None):
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


_cuda_aware = _knows_cuda()


def _addressable(tensor: Tensor) -> bool:
    """Whether MPI can read and write the tensor where it is; if so on a device, its pending work is finished first."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.device.type == "cpu":
        return True
    if tensor.device.type == "cuda" and _cuda_aware:
        torch.cuda.current_stream(tensor.device).synchronize()
        return True
    return False


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to stage for `device`."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def own_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's tensors of the DTensors that DistributedDataParallel gives for DTensor parameters."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def readable(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor, or a staged copy of it, in `dtype`, for MPI to read."""
    tensor = tensor.detach()
    dtype = dtype or tensor.dtype
    if dtype == tensor.dtype and _addressable(tensor):
        return tensor
    return _empty(tensor.shape, dtype, tensor.device).copy_(tensor)


def readable_beside(source: Tensor, output: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `readable`; a copy where the source is a part of the output, which NCCL and Gloo accept, and MPI does not."""
    found = readable(source, dtype)
    is_part = found.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return found.clone() if is_part else found


def writable(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor, or room of its shape in `dtype`, for MPI to write."""
    dtype = dtype or tensor.dtype
    if dtype == tensor.dtype and _addressable(tensor):
        return tensor
    return _empty(tensor.shape, dtype, tensor.device)


def copy_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None] | None:
    """Copies (into, staged) pairs when communication is done, those that were staged."""
    staged = [(into, buffer) for into, buffer in pairs if into.data_ptr() != buffer.data_ptr()]
    if not staged:
        return None

    def copy() -> None:
        for into, buffer in staged:
            into.copy_(buffer)

    return copy


def packed_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of the tensors, one after the other, for MPI to read."""
    whole = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors)
    return readable(torch.cat([tensor.view(-1).view(torch.uint8) for tensor in whole]))


def room_for(parts: Sequence[Tensor]) -> Tensor:
    """Room for the bytes of the tensors, one after the other, for MPI to write."""
    return torch.empty(sum(sizes(parts)), dtype=torch.uint8, device="cpu")


def deal(room: Tensor, parts: Sequence[Tensor]) -> Callable[[], None]:
    """Copies the staged bytes into the tensors, when communication is done."""

    def copy() -> None:
        for part, piece in zip(parts, room.split(sizes(parts)), strict=True):
            # A piece may start at any byte, a view in another dtype may not: copy it to memory of its own first.
            part.copy_(piece.clone().view(part.dtype).view(part.shape))

    return copy


def sizes(parts: Sequence[Tensor]) -> list[int]:
    """Bytes of each tensor."""
    return [part.nbytes for part in parts]


def contiguous_memory(tensor: Tensor) -> MPI.buffer:
    """The memory of a contiguous tensor."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def message(tensor: Tensor, parts: Sequence[int] | None = None) -> list[Any]:
    """A contiguous tensor as bytes for one rank, or in consecutive parts of so many bytes, one for every rank."""
    if parts is None:
        return [contiguous_memory(tensor), tensor.nbytes, MPI.BYTE]
    starts = [0, *itertools.accumulate(parts)][: len(parts)]
    return [contiguous_memory(tensor), (parts, starts), MPI.BYTE]
