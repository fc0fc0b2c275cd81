"""Regions of arrays, read past the libraries of their files, each piece by one request: whole HDF5 chunks, and runs.

Large HDF5 chunks without filters bypass the library's cache. A run is a sequence of elements that are adjacent in file
and in memory.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from distconv.reading.view import Region

LARGE_CHUNK = 1 << 20  # Bytes from which on a chunk is worth a request of its own.


def are_large(dataset: Any) -> bool:
    """Whether a chunk of h5py's Dataset takes `LARGE_CHUNK` bytes."""
    return dataset.chunks is not None and math.prod(dataset.chunks) * dataset.dtype.itemsize >= LARGE_CHUNK


def are_plain(dataset: Any) -> bool:
    """Whether the bytes of chunks are in the file as in memory."""
    import h5py

    return not dataset.id.get_create_plist().get_nfilters() and dataset.id.get_type().equal(
        h5py.h5t.py_create(dataset.dtype)
    )


def are_whole(region: Region, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Whether a region that is not empty is made of whole chunks. Pure."""
    return all(
        at.step == 1 and at.start % size == 0 and (at.stop % size == 0 or at.stop == extent)
        for at, extent, size in zip(region, shape, chunk, strict=True)
    )


def read_from_chunks(dataset: Any, region: Region) -> numpy.ndarray:
    """A region of whole, plain chunks. RuntimeError or OSError where one of them is not in the file."""
    size = dataset.chunks
    result = numpy.empty([len(at) for at in region], dataset.dtype)
    for first in itertools.product(*(range(at.start, at.stop, each) for at, each in zip(region, size, strict=True))):
        begin = [start - at.start for start, at in zip(first, region, strict=True)]
        part = result[tuple(slice(start, start + each) for start, each in zip(begin, size, strict=True))]
        # A chunk at the edge of the array is whole in the file.
        direct = part.shape == size and part.flags.c_contiguous
        chunk = part if direct else numpy.empty(size, dataset.dtype)
        dataset.id.read_direct_chunk(first, out=chunk.reshape(-1).view(numpy.uint8))
        if not direct:
            part[...] = chunk[tuple(slice(extent) for extent in part.shape)]
    return result


LARGE_RUN = (
    128 << 10
)  # Bytes from which on a run is worth a request of its own; shorter ones are taken from a memory map.


def run_dims(shape: Sequence[int], region: Region) -> int:
    """How many of the last dims a run spans: all that are read whole, and the one before them. Pure."""
    whole = 0
    for at, extent in zip(reversed(region), reversed(shape), strict=True):
        if at.step != 1 or (at.start, at.stop) != (0, extent):
            return whole + (at.step == 1)
        whole += 1
    return whole


def runs(shape: Sequence[int], region: Region) -> Iterator[int]:
    """The first element of every run of a region, in the region's order; the array's last dim runs fastest. Pure."""
    dims = run_dims(shape, region)
    outer = region[: len(region) - dims]
    inner = sum(at.start * math.prod(shape[dim + 1 :]) for dim, at in enumerate(region) if dim >= len(outer))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(outer))]
    for place in itertools.product(*outer):
        yield inner + sum(at * stride for at, stride in zip(place, strides, strict=True))


def run_elements(shape: Sequence[int], region: Region) -> int:
    """The number of elements of every run. Pure."""
    dims = run_dims(shape, region)
    return math.prod(len(at) for at in region[len(region) - dims :])


def read_region(
    descriptor: int, offset: int, shape: Sequence[int], dtype: numpy.dtype[Any], region: Region
) -> numpy.ndarray:
    """A region of an array that begins at `offset`, its last dim fastest. OSError if the file ends before."""
    result = numpy.empty([len(at) for at in region], dtype)
    target = result.reshape(-1).view(numpy.uint8)
    size = run_elements(shape, region) * dtype.itemsize
    at = 0
    for first in runs(shape, region):
        begin, end = offset + first * dtype.itemsize, at + size
        while at < end:
            got = os.preadv(descriptor, [target[at:end].data], begin)
            if not got:
                raise OSError(f"the file ends at byte {begin}")
            at, begin = at + got, begin + got
    return result
