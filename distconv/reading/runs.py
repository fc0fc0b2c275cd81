"""Reads a region of an array run by run: a run is a sequence of elements that are adjacent in file and in memory."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from distconv.reading.view import Region

LARGE = 128 << 10  # Bytes from which on a run is worth a request of its own; shorter ones are taken from a memory map.


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
