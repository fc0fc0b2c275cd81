"""What ranks exchange of a batch's samples before it is complete: parts of arrays of any shapes, in all-to-alls on the
host, and statistics, such as percentiles, which ranks compute together, as each reads only a part of a sample.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.reading.expression import empty_array
from distconv.reading.fault import ReadError, as_read_error, note
from distconv.reading.share import Share
from distconv.reading.source import shown
from distconv.reading.statistic import Statistic, digest_text
from distconv.reading.store import Sample, sample
from distconv.reading.view import Region, slices
from distconv.tensors.mesh import whole_group
from distconv.tensors.process_groups import new_group
from distconv.transfer.route import AllToAll


class SampleStatistics:
    """The known statistics of samples, and the computation of missing ones among the ranks.

    Each rank reads its slab. One of the ranks with the sample, another one for the next array, gets all slabs, and
    computes with the program's own function what one process would; then every rank of the mesh receives the numbers.
    """

    def __init__(self, mesh: DeviceMesh, share: Share) -> None:
        self._mesh, self._share = mesh, share
        sizes = list(mesh.shape)
        axis = share.names.index("sample") if "sample" in share.names else None
        own = [range(size) if place != axis else [share.of_samples] for place, size in enumerate(sizes)]
        self._shares = [replace(share, coordinate=each) for each in itertools.product(*own)]
        ranks = mesh.mesh.movedim(axis, 0) if axis is not None else mesh.mesh[None]
        self._exchange = SlabExchange(ranks.reshape(len(ranks), -1).tolist())
        self._known: dict[Sample, dict[str, Any]] = {}

    def known(self, number: int, indices: Iterable[Any]) -> dict[str, Any]:
        """The statistics of these samples, by digest."""
        found: dict[str, Any] = {}
        for index in indices:
            found |= self._known.get(sample(number, index), {})
        return found

    def learn(self, number: int, found: Iterable[tuple[Any, str, Any]]) -> None:
        """Keeps statistics, in place of all that their samples had before."""
        fresh: dict[Sample, dict[str, Any]] = {}
        for index, digest, value in found:
            fresh.setdefault(sample(number, index), {})[digest] = value
        self._known |= fresh

    def find(self, wanted: Sequence[tuple[Any, Statistic]], slabs: list[Any]) -> list[tuple[Any, str, Any]]:
        """The index of a sample, the digest and the value of all statistics that are wanted, those of other ranks'
        samples among them.

        Collective over the mesh. `wanted` are the same on all ranks with the same samples, but for their digests, which
        differ where each machine has a copy of the files. `slabs` is what this rank has read for each of them, and is
        emptied: with samples of many GiB nothing is kept longer than it must be. On every rank the same ReadError where
        one cannot be computed.
        """
        parents = dict.fromkeys(digest_text(each.parent) for _, each in wanted)
        owner = {text: place % len(self._shares) for place, text in enumerate(parents)}
        sent: list[list[tuple[Any, Any]]] = [[] for _ in self._shares]
        for _, each in wanted:
            slab = slabs.pop(0)
            text = digest_text(each.parent)
            regions = [share.region((1, *each.parent.shape))[1:] for share in self._shares]
            own = regions[self._shares.index(self._share)]
            first = regions.index(own) == self._shares.index(self._share)
            if text in parents and first and all(map(len, own)):
                sent[owner[text]].append(((list(owner).index(text), own), _as_bytes(slab)))
            parents.pop(text, None)
            del slab
        received: dict[int, list[tuple[Region, Any]]] = {}
        for (place, region), content in self._exchange(sent):
            received.setdefault(place, []).append((region, content))
            del content
        computed: list[tuple[int, Any, str, Any]] = []
        fault = ""
        try:
            computed += self._computed(wanted, list(owner), received)
        except ReadError as error:
            fault = str(error)
        answers: list[Any] = [None] * self._mesh.size()
        dist.all_gather_object(answers, (self._share.of_samples, computed, fault), group=whole_group(self._mesh))
        for *_, each in answers:
            if each:
                raise ReadError(each)
        return [
            (index, wanted[place][1].digest if of_samples == self._share.of_samples else digest, value)
            for of_samples, found, _ in answers
            for place, index, digest, value in found
        ]

    def _computed(
        self, wanted: Sequence[tuple[Any, Statistic]], texts: list[str], received: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str, Any]]:
        """The place of each statistic among those wanted, the index of its sample, its digest and its value."""
        parents = [texts.index(digest_text(each.parent)) for _, each in wanted]
        whole, of = None, -1
        for place, (index, each) in sorted(enumerate(wanted), key=lambda one: parents[one[0]]):
            parent = parents[place]
            try:
                if parent in received:
                    whole, of = None, parent
                    whole = _joined(each.parent.shape, each.parent.dtype, received.pop(parent))
                if of == parent:
                    yield place, index, each.digest, each.compute(whole)
            except Exception as error:
                for source in each.sources():
                    note(error, shown(source.path), source.key)
                raise as_read_error(error, index) or error from error


def _as_bytes(slab: Any) -> numpy.ndarray:
    if isinstance(slab, Tensor):
        return slab.contiguous().reshape(-1).view(torch.uint8).numpy()
    return numpy.ascontiguousarray(slab).reshape(-1).view(numpy.uint8)


def _joined(shape: Sequence[int], dtype: Any, parts: Sequence[tuple[Region, numpy.ndarray]]) -> Any:
    """The whole, from the bytes of regions."""
    result = empty_array(shape, dtype)
    for region, content in parts:
        extents = [len(positions) for positions in region]
        where = slices(region)
        if isinstance(result, Tensor):
            result[where] = torch.from_numpy(content.copy()).view(dtype).reshape(extents)
        else:
            result[where] = content.view(dtype).reshape(extents)
    return result


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
