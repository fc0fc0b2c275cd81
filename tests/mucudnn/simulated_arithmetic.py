"""What the simulated cuDNN computes, by torch, at addresses of memory."""

from __future__ import annotations

import ctypes
from ctypes import c_char

import torch
from torch.nn import functional

from mucudnn.convolution.problem import Role
from mucudnn.providers.cudnn.backend import DATA_TYPES, DescriptorKind, NumericalNote
from mucudnn.providers.stock import stock_kernel

DTYPES = {number: getattr(torch, name) for name, number in DATA_TYPES.items()}

NOTES = {
    0: [],
    1: [],
    2: [NumericalNote.NONDETERMINISTIC],
    3: [NumericalNote.TENSOR_CORE],
    4: [NumericalNote.DOWN_CONVERT_INPUTS, NumericalNote.TENSOR_CORE],
    5: [],
}
"""Numerical notes by engine. Engine 1 needs memory per sample; engine 5 serves nothing."""

TENSORS = {
    DescriptorKind.OPERATION_CONVOLUTION_FORWARD: (Role.Y, 700),
    DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_DATA: (Role.X, 706),
    DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_FILTER: (Role.W, 712),
}
LEGACY = {"Forward": Role.Y, "BackwardData": Role.X, "BackwardFilter": Role.W}
ORDER = {Role.Y: (Role.X, Role.W, Role.Y), Role.X: (Role.W, Role.Y, Role.X), Role.W: (Role.X, Role.Y, Role.W)}


def at(address: int, dtype: torch.dtype, shape: list[int], steps: list[int]) -> torch.Tensor:
    """The memory at an address."""
    last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    buffer = (c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, steps)


def spoil(address: int, size: int) -> None:
    """Overwrites a workspace, all of which an engine may."""
    if size:
        ctypes.memset(address, 0xFF, size)


def compute(
    target: Role,
    tensors: list[torch.Tensor],
    before: list[int],
    after: list[int],
    stride: list[int],
    dilation: list[int],
    beta: float,
) -> None:
    x, w, y = (tensor.double() for tensor in tensors)
    ends = [end for pair in reversed(list(zip(before, after, strict=True))) for end in pair]
    groups = x.shape[1] // w.shape[1]

    padded = functional.pad(x.nan_to_num() if target is Role.X else x, ends)
    none = [0] * len(stride)
    # Beneath the shim, which may be what asks.
    if target is Role.Y:
        kernel = stock_kernel("convolution", "CPU")
        result = kernel(padded, w, None, stride, none, dilation, False, none, groups)
    else:
        kernel = stock_kernel("convolution_backward", "CPU")
        mask = [target is Role.X, target is Role.W, False]
        read = w.nan_to_num() if mask[1] else w
        geometry = stride, none, dilation, False, none, groups
        result = kernel(y, padded, read, None, *geometry, mask)[mask.index(True)]
        if target is Role.X:
            result = functional.pad(result, [-end for end in ends])
    written = tensors[list(Role).index(target)]
    if beta:
        result = result + beta * written.double()
    assert result.shape == written.shape
    written.copy_(result)
