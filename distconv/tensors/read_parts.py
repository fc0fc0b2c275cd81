"""What was read in place of plain tensors: behind ``buffer.data = other``, backward reads the other one.

In one process a layer saves a buffer itself for backward, which so reads what was assigned to its `data` since. A rule
saves a part of it, and parts in turn save copies: these are given the new memory here.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distconv.tensors.refusal import UnsupportedOperation


class _Thread(threading.local):
    part: int | None = None


thread = _Thread()
"""The number of the part that computes in turn in this thread, another one for every part of the process."""


class _Read(NamedTuple):
    """A tensor that graphs may have saved in place of another one."""

    tensor: TensorWeakRef
    within: int | None  # The part in turn in which alone it follows while parts run; None: in all. Below 0: in none.
    start: int | None  # Of a part of the tensor, where it begins there; None of a copy.


_reads: WeakIdKeyDictionary = WeakIdKeyDictionary()

DATA: Any = Tensor.data  # Torch's own property.


def note_part(x: Tensor, part: Tensor) -> Tensor:
    """Notes a part of a plain tensor, in its memory, that a rule reads in its place, and returns it."""
    if torch.is_grad_enabled():
        _add(x, _Read(TensorWeakRef(part), thread.part, int(part.storage_offset() - x.storage_offset())))
    return part


def note_copy(x: Tensor, copy: Tensor, part: int) -> None:
    """Notes what a part in turn, not the first, has of a plain tensor. It has older ones from calls before."""
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        older = [each._replace(within=None) for each in _live(x) if each.within == -part]
        if older:
            _reads[copy] = older
        _add(x, _Read(TensorWeakRef(copy), -part, None))


def with_data(x: Tensor, other: Tensor) -> Tensor:
    """A plain tensor with the memory of another, which `follow_data` follows."""
    follow_data(x, other)
    DATA.__set__(x, other)
    return x


def _live(x: Tensor) -> list[_Read]:
    return [each for each in _reads.get(x, ()) if each.tensor() is not None]


def _add(x: Tensor, read: _Read) -> None:
    reads = _reads.setdefault(x, [])
    if len(reads) & (len(reads) - 1) == 0:  # at powers of two, so that there are at most twice as many as live ones
        reads[:] = _live(x)
    reads.append(read)


def follow_data(x: Tensor, other: Tensor) -> None:
    """Before a plain tensor gets the memory of another: gives it to what graphs have saved in the tensor's place.

    Within a part in turn, what other parts have read stays as it is until they read the same.

    Raises:
        UnsupportedOperation: where the other tensor has another shape or dtype.
    """
    reads = [each for each in _live(x) if thread.part is None or each.within in (None, thread.part)]
    if not reads:
        return
    if (other.shape, other.dtype) != (x.shape, x.dtype):
        raise UnsupportedOperation(
            f"a tensor {tuple(x.shape)}: its data was replaced by {tuple(other.shape)} of {other.dtype} after a layer"
            " had used it; accepted: the shape and dtype that it has, or once backward has run"
        )
    for copy in [each.tensor() for each in reads if each.start is None]:
        reads += [each for each in _live(copy) if each.start is not None]
        DATA.__set__(copy, other)
    if any(each.start is not None for each in reads) and other.stride() != x.stride():
        other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(other)
    for tensor, _, start in reads:
        part = tensor()
        if part is not None and start is not None:
            DATA.__set__(part, other.as_strided(part.shape, part.stride(), other.storage_offset() + start))
