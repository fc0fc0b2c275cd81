"""Exchanges parts of arrays of a batch between ranks: all-to-alls on the host, of arrays of any shapes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.process_groups import new_group
from distconv.transfer.route import AllToAll

_T = TypeVar("_T")

ALIGNED = 64  # Bytes: where an array begins in what is sent.


class SlabExchange:
    """All-to-alls among ranks, on the host and in groups of their own, so in any thread.

    ``lines``: the ranks of each group, as many in one as in another; each rank is in one of them.
    """

    def __init__(self, lines: Sequence[Sequence[int]]) -> None:
        self._group: dist.ProcessGroup | None = None
        self.size = len(lines[0])
        host = "gloo" if dist.get_backend() == "nccl" else None
        for line in lines if self.size > 1 else ():
            group = new_group(line, backend=host)
            if dist.get_rank() in line:
                self._group = group

    @classmethod
    def along_samples(cls, mesh: DeviceMesh) -> SlabExchange:
        """Among ranks with the same place in space."""
        names = mesh.mesh_dim_names or ()
        if "sample" not in names:
            return cls([[rank] for rank in mesh.mesh.flatten().tolist()])
        axis = names.index("sample")
        return cls(mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist())

    def __call__(self, parts: Sequence[list[tuple[Any, Any]]]) -> list[tuple[Any, Any]]:
        """Sends the arrays of `parts[i]`, each with a key, to member i, and returns those for this rank. Collective.

        The lists are emptied, so that an array without other references is freed once it was copied.
        """
        packed, sent = _packed(parts)
        counts = torch.tensor(sent, dtype=torch.int64, device="cpu")
        each = [1] * self.size
        received: list[int] = AllToAll(torch.empty_like(counts), counts, each, each, self._group).wait().tolist()
        output = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
        flat = AllToAll(output, packed, received, sent, self._group).wait()
        return [part for parcel in flat.split(received) for part in _unpacked(parcel)]


def _packed(parts: Sequence[list[tuple[Any, Any]]]) -> tuple[Tensor, list[int]]:
    """The bytes of lists of parts, one after another, and how many each list takes. A list is the length of its head,
    the head, and the arrays, each at a multiple of ALIGNED. The lists are emptied."""
    heads = [_head(each) if each else b"" for each in parts]
    sizes = [
        sum(map(_padded, [len(head), *(array.nbytes for _, array in each)]))
        for head, each in zip(heads, parts, strict=True)
    ]
    result = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    content, start = result.numpy(), 0
    for head, each in zip(heads, parts, strict=True):
        content[start : start + len(head)] = numpy.frombuffer(head, numpy.uint8)
        start += _padded(len(head))
        while each:
            array = numpy.ascontiguousarray(each.pop(0)[1])
            content[start : start + array.nbytes] = array.reshape(-1).view(numpy.uint8)
            start += _padded(array.nbytes)
    return result, sizes


def _head(parts: Sequence[tuple[Any, Any]]) -> bytes:
    known = [(key, array.dtype, array.shape) for key, array in parts]
    scalars = [isinstance(array, numpy.generic) for _, array in parts]
    head = pickle.dumps((known, scalars))
    return len(head).to_bytes(8, "little") + head


def _unpacked(parcel: Tensor) -> list[tuple[Any, Any]]:
    if not parcel.numel():
        return []
    content = parcel.numpy()
    length = int.from_bytes(content[:8].tobytes(), "little")
    known, scalars = pickle.loads(content[8 : 8 + length].tobytes())
    parts, start = [], _padded(8 + length)
    for (key, dtype, shape), scalar in zip(known, scalars, strict=True):
        count = int(numpy.prod(shape, dtype=numpy.int64)) * dtype.itemsize
        array = content[start : start + count].view(dtype).reshape(shape)
        array.flags.writeable = False
        parts.append((key, array.reshape(())[()] if scalar else array))
        start += _padded(count)
    return parts


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def begun_in_thread(function: Callable[[], _T]) -> Future[_T]:
    """The result of a function that runs in a thread of its own, which ends with the process."""
    future = Future[_T]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return future
