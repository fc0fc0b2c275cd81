"""Reductions by MPI: the MPI types and operations that correspond to torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from distconv.mpi.backend import BACKEND
from distconv.mpi.staging import contiguous_memory

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
