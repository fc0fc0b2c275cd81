"""Sources: arrays in files, with their names, and reading of a region.

A source can be sent to another process. Every process opens the file itself, once, and never reads through a handle
that another process has opened.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from distconv.reading import regions
from distconv.reading.fault import note
from distconv.reading.view import Region, slices

OPEN = 64  # Files of one kind that a process keeps open.

Stamp = tuple[int, ...]


def _stamp(path: str) -> Stamp:
    """A value that differs between processes, and that changes when the file is changed or replaced."""
    status = os.stat(path)
    return os.getpid(), status.st_ino, status.st_size, status.st_mtime_ns


_APART = re.compile(r"^.*/distconv-[^/]+/.*?/there(?=/)")


def shown(path: str) -> str:
    """A path as the script has it, and not as the rank's private files have it."""
    return _APART.sub("", path)


class Keeper(Protocol):
    """An object that may already have parts of arrays in files."""

    def part(self, source: Source, wanted: Region) -> numpy.ndarray: ...

    def small(self, source: Source, index: str, read: Callable[[], Any]) -> Any: ...


class Depth(threading.local):
    """How many samples, one within another, this thread makes lazily now; none while it reads what is needed.

    `keeper` is asked before a file is read.
    """

    value = 0
    keeper: Keeper | None = None


depth = Depth()


def fetched(source: Source, wanted: Region) -> numpy.ndarray:
    """A region of an array, from the file or from this thread's keeper. It may be read-only."""
    return source.read(wanted) if depth.keeper is None else depth.keeper.part(source, wanted)


@contextlib.contextmanager
def reading(path: str, key: str) -> Iterator[None]:
    """A context in which this thread reads at once. An exception that leaves it notes what was being read."""
    before, depth.value = depth.value, 0
    try:
        yield
    except Exception as error:
        note(error, shown(path), key)
        raise
    finally:
        depth.value = before


@dataclass(frozen=True)
class Source(abc.ABC):
    """An array in a file. The dtype is NumPy's."""

    path: str  # The path of the file, or of the folder if the format is one.
    key: str  # The name of the array in it; "" where there is only one.
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]

    def read(self, wanted: Region) -> numpy.ndarray:
        """A new array of a region. ReadError where it cannot be read."""
        with reading(self.path, self.key):
            array = self._array(_stamp(self.path))
            # Single elements along the last dim cost far more to choose in a file than in memory.
            last = wanted[-1] if wanted else range(1)
            dense = last.step == 1
            region = wanted if dense else (*wanted[:-1], range(last.start, last[-1] + 1))
            part = self._part(array, region)
        return part if dense else part[..., :: last.step]

    def stamp(self) -> tuple[int, ...] | None:
        """A value that changes when the file is changed or replaced; None if there is no file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def __str__(self) -> str:
        return f"{shown(self.path)}: {self.key}" if self.key else shown(self.path)

    @abc.abstractmethod
    def _array(self, stamp: Stamp) -> Any:
        """The array of the file, open in this process."""

    def _part(self, array: Any, region: Region) -> numpy.ndarray:
        return numpy.array(array[slices(region)])


class Hdf5(Source):
    """A data set of an HDF5 file."""

    def _array(self, stamp: Stamp) -> Any:
        return _hdf5(self.path, self.key, stamp)

    def _part(self, array: Any, region: Region) -> numpy.ndarray:
        if array.file.driver != "sec2" or not regions.are_large(array):
            return array[slices(region)]
        # What follows a chunk in the file is another rank's, unless all of a sample is read.
        is_cut = any(len(at) < extent for at, extent in zip(region[1:], self.shape[1:], strict=True))
        with no_read_ahead(array.file.id.get_vfd_handle()) if is_cut else contextlib.nullcontext():
            if regions.are_whole(region, self.shape, array.chunks) and regions.are_plain(array):
                with contextlib.suppress(RuntimeError, OSError):  # one is not in the file: HDF5 knows its contents
                    return regions.read_from_chunks(array, region)
            return array[slices(region)]


@contextlib.contextmanager
def no_read_ahead(descriptor: int) -> Iterator[None]:
    """A context in which the disk delivers only the requested parts of a file.

    Ranks that read a slab of every sample would otherwise read their neighbours' slabs as well.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        yield
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)


@functools.lru_cache(OPEN)
def _hdf5_file(path: str, stamp: Stamp) -> Any:
    import h5py

    # By its own name: the path is the one that was opened, whatever the rank's files say of such a name.
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY))


@functools.lru_cache(OPEN)
def _hdf5(path: str, key: str, stamp: Stamp) -> Any:
    return _hdf5_file(path, stamp)[key]


class ZarrStore(Source):
    """An array of a Zarr store in a folder."""

    def _array(self, stamp: Stamp) -> Any:
        return _zarr(self.path, self.key, stamp)

    def _part(self, array: Any, region: Region) -> numpy.ndarray:
        return numpy.asarray(array[slices(region)])


@functools.lru_cache(OPEN)
def _zarr(path: str, key: str, stamp: Stamp) -> Any:
    import zarr

    return zarr.open_array(path, path=key, mode="r")


@dataclass(frozen=True)
class Raw(Source):
    """An array whose bytes in a file are those in memory."""

    offset: int  # The position of its first element in the file, in bytes.
    order: str  # "C", or "F" where the first dim runs fastest.

    def _array(self, stamp: Stamp) -> Any:
        mapped = _mapped(self.path, stamp)
        end = self.offset + self.dtype.itemsize * math.prod(self.shape)
        if mapped.size < end:
            raise OSError(f"the file has {mapped.size} bytes; the array ends at {end}")
        array: Any = numpy.ndarray(self.shape, self.dtype, mapped.data, self.offset, order=self.order)  # type: ignore[arg-type]
        return array, _opened(self.path, stamp).fileno()

    def _part(self, array: Any, region: Region) -> numpy.ndarray:
        mapped, descriptor = array
        turned = slice(None, None, 1 if self.order == "C" else -1)  # so that the last dim runs fastest
        shape, box = self.shape[turned], region[turned]
        # A map reads what is around each page that is asked for.
        if regions.run_elements(shape, box) * self.dtype.itemsize >= regions.LARGE_RUN:
            part = regions.read_region(descriptor, self.offset, shape, self.dtype, box)
            return part if self.order == "C" else part.transpose()
        return numpy.array(mapped[slices(region)])


@functools.lru_cache(OPEN)
def _mapped(path: str, stamp: Stamp) -> numpy.ndarray:
    return numpy.memmap(path, numpy.uint8, "r")


@functools.lru_cache(OPEN)
def _opened(path: str, stamp: Stamp) -> Any:
    return open(path, "rb", buffering=0)
