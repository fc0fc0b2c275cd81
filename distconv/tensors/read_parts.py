"""What was read in place of plain tensors: behind ``buffer.data = other``, backward reads the other one.

In one process a layer saves a buffer itself for backward, which so reads what was assigned to its `data` since. A rule
saves a part of it, and parts in turn save copies: these are given the new memory here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distconv.tensors.refusal import UnsupportedOperation

_reads: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By plain tensor: weak references to what was read in its place."""


def note_read(x: Tensor, read: Tensor) -> Tensor:
    """Notes a part or copy of a plain tensor, which a graph may save in its place, and returns it."""
    if torch.is_grad_enabled() and x.is_floating_point():
        reads = _reads.setdefault(x, [])
        if len(reads) & (len(reads) - 1) == 0:  # at powers of two, so that there are at most twice as many as live ones
            reads[:] = [each for each in reads if each() is not None]
        reads.append(TensorWeakRef(read))
    return read


def follow_data(x: Tensor, other: Tensor) -> None:
    """Before a plain tensor gets the memory of another: gives it to what graphs have saved in the tensor's place.

    Raises:
        UnsupportedOperation: where the other tensor has another shape.
    """
    for read in [each() for each in _reads.get(x, ())]:
        if read is None:
            continue
        if other.shape != x.shape or other.dtype != x.dtype:
            raise UnsupportedOperation(
                f"a tensor {tuple(x.shape)}: its data was replaced by {tuple(other.shape)} of {other.dtype} after a"
                " layer had used it; accepted: the shape and dtype that it has, or once backward has run"
            )
        own = other
        if read.shape != x.shape:
            if other.stride() != x.stride():
                other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(other)
            start = other.storage_offset() + read.storage_offset() - x.storage_offset()
            own = other.as_strided(read.shape, read.stride(), start)
        read.data = own
