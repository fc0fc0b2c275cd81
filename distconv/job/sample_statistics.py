"""Statistics of samples, such as percentiles, which ranks compute together, as each reads only a part of a sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.job.slab_exchange import SlabExchange
from distconv.reading.expression import empty_array
from distconv.reading.fault import ReadError, as_read_error, note
from distconv.reading.share import Share
from distconv.reading.source import shown
from distconv.reading.statistic import Statistic, digest_text
from distconv.reading.store import Sample, sample
from distconv.reading.view import Region, slices
from distconv.tensors.mesh import whole_group


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
