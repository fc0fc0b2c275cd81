"""Replacements for reading an array of HDF5, Zarr or a memory map: they give a lazy array where possible."""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy

from distconv.reading.array import LazyArray, is_lazy
from distconv.reading.expression import Stored
from distconv.reading.memory import report_whole_read
from distconv.reading.source import Hdf5, Raw, Source, ZarrStore, depth, reading, shown
from distconv.reading.view import plain_index

LEAST = 256  # Elements below which an array is read at once.

_READABLE = "biufc"  # Kinds of NumPy's dtypes that are read lazily.

_SMALL = "a small array"


def of_hdf5(read: Any) -> Any:
    def getitem(dataset: Any, key: Any, new_dtype: Any = None) -> Any:
        if not depth.value:
            return read(dataset, key, new_dtype)
        source = hdf5(dataset) if new_dtype is None else "h5py.Dataset.astype"
        return _chosen(source, key, dataset.file.filename, dataset.name or "", lambda: read(dataset, key, new_dtype))

    return getitem


def of_zarr(read: Any) -> Any:
    def getitem(array: Any, key: Any) -> Any:
        if not depth.value:
            return read(array, key)
        return _chosen(zarr(array), key, str(array.store_path), array.name or "", lambda: read(array, key))

    return getitem


def of_memmap(read: Any) -> Any:
    def getitem(array: Any, key: Any) -> Any:
        if not depth.value or array.filename is None or array._mmap is None:
            return read(array, key)  # not a part of a file
        if _is_view(key):
            whole = getitem(array, ...)
            if is_lazy(whole):
                return whole[key]
        return _chosen(memmap(array), key, str(array.filename), "", lambda: read(array, key))

    return getitem


def _chosen(source: Source | str, key: Any, path: str, name: str, read: Callable[[], Any]) -> Any:
    """The elements that `key` chooses of an array in a file, lazily; read at once if they are few, or if a reason is
    given in place of a source, which is reported."""
    made = source if isinstance(source, str) else lazy(source, key)
    if not isinstance(made, str):
        return made
    with reading(path, name):
        if depth.keeper is not None and isinstance(source, Source) and made == _SMALL:
            found = depth.keeper.small(source, repr(key), read)
        else:
            found = read()
    if type(found) is not LazyArray and isinstance(found, numpy.ndarray) and found.ndim > 1 and found.size >= LEAST:
        report_whole_read(made, [f"{shown(path)}: {name}" if name else shown(path)])
    return found


def lazy(source: Source, key: Any) -> Any:
    """What `key` chooses of an array in a file, lazily; a text with the reason if they must be read at once."""
    if source.dtype.kind not in _READABLE:
        return f"dtype {source.dtype}"
    if _is_view(key):
        return "an index with a new dim or a negative step"
    keys = plain_index(key)
    if keys is None:
        return "an index of more than numbers and slices"
    try:
        chosen = LazyArray(Stored(source)).view_as_lazy(operator.itemgetter(keys))
    except IndexError:
        return "an index out of bounds"  # and fails as it does
    if chosen.ndim < 2 or chosen.size < LEAST:
        return _SMALL
    return LazyArray(chosen.expression)


def _is_view(key: Any) -> bool:
    """Whether an index is one of NumPy's views that reading a file does not know: a new dim, or a negative step."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(each is None or (isinstance(each, slice) and each.step is not None and each.step < 0) for each in keys)


def hdf5(dataset: Any) -> Source | str:
    """A data set of a file that is open for reading; a reason, as text, for one that is written to, or on no disk."""
    file = dataset.file
    if file.mode != "r":
        return f"a file opened with mode {file.mode!r}"
    if file.driver != "sec2":
        return f"a file opened with driver {file.driver!r}"
    if dataset.shape is None or not dataset.name or not os.path.isfile(file.filename):
        return "an array without a name in a file"
    return Hdf5(os.path.abspath(file.filename), dataset.name, dataset.shape, dataset.dtype)


def zarr(array: Any) -> Source | str:
    """An array in a folder that is open for reading; why not, for what the program writes to, and other stores."""
    root = getattr(array.store_path.store, "root", None)
    if root is None or not os.path.isdir(root):
        return "a Zarr store that is no folder"
    if not array.read_only:
        return "a Zarr array that is open for writing"
    return ZarrStore(os.path.abspath(root), array.store_path.path, array.shape, array.dtype)


def memmap(array: Any) -> Source | str:
    """A memory map that cannot be written to; why not, for others, and for parts of maps with gaps."""
    if array.mode != "r":
        return f"numpy.memmap with mode {array.mode!r}"
    if not (array.flags.c_contiguous or array.flags.f_contiguous) or not array.size:
        return "a part of numpy.memmap with gaps"
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + _address(array) - _address(numpy.frombuffer(array._mmap, numpy.uint8))
    order = "C" if array.flags.c_contiguous else "F"
    return Raw(os.path.abspath(array.filename), "", array.shape, array.dtype, offset, order)


def _address(array: numpy.ndarray) -> int:
    return array.__array_interface__["data"][0]
