"""Large HDF5 chunks without filters: each is read from the file in one piece, bypassing the library's cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy

from distconv.reading.view import Region

LARGE = 1 << 20  # Bytes from which on a chunk is worth a request of its own.


def are_large(dataset: Any) -> bool:
    """Whether a chunk of h5py's Dataset takes `LARGE` bytes."""
    return dataset.chunks is not None and math.prod(dataset.chunks) * dataset.dtype.itemsize >= LARGE


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
