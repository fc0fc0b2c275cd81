"""Messages as MPI takes them: it uses a tensor in place where it can address it, else a contiguous, pinned host copy.

Reductions have the MPI types and operations that correspond to torch's.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from distconv.mpi.backend import BACKEND
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


_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
}
_REDUCED_IN_FLOAT32 = {torch.float16, torch.bfloat16}
_OPERATIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,  # divided by the size afterwards
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
_OPERATIONS_ON_BOOL = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.BXOR: MPI.LXOR,
}


class MpiReduction:
    """How one dtype is reduced: the dtype that travels, the MPI operation, and the division of an average."""

    def __init__(self, dtype: torch.dtype, operation: Any, size: int) -> None:
        kind = getattr(operation, "op", operation)
        table = _OPERATIONS_ON_BOOL if dtype == torch.bool else _OPERATIONS
        self.dtype = torch.float32 if dtype in _REDUCED_IN_FLOAT32 else dtype
        if kind not in table or self.dtype not in _TYPES:
            raise NotImplementedError(f"{BACKEND}: {kind.name} of {dtype} is not supported")
        bitwise = kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        if (bitwise and dtype.is_floating_point) or (dtype.is_complex and table[kind] not in (MPI.SUM, MPI.PROD)):
            raise NotImplementedError(f"{BACKEND}: {kind.name} of {dtype} has no meaning")
        self.operation = table[kind]
        self.divisor = size if kind == ReduceOp.AVG else None

    def message(self, buffer: Tensor) -> list[Any]:
        """The buffer as elements of an MPI type."""
        return [contiguous_memory(buffer), buffer.numel(), _TYPES[self.dtype]]


def divide(plans: list[MpiReduction], buffers: list[Tensor]) -> Callable[[], None] | None:
    """Divides the buffers that are averaged, when communication is done."""
    averaged = [(buffer, plan.divisor) for plan, buffer in zip(plans, buffers, strict=True) if plan.divisor is not None]
    if not averaged:
        return None

    def finish() -> None:
        for buffer, divisor in averaged:
            rounding = None if buffer.is_floating_point() or buffer.is_complex() else "trunc"
            buffer.div_(divisor, rounding_mode=rounding)

    return finish
