"""Copies arrays to Zarr, in chunks that suit a partition, each with a checksum."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distconv.reading import opening
from distconv.reading.source import Source
from distconv.settings.partition import AXES, Kind, Partition

CHUNK_BYTES = 16 << 20
"""The most that a chunk takes before it is compressed, where it can be cut further."""

CUBE = 64
"""The most elements of a chunk along a dim of space, for an unknown partition."""

SUFFIXES = (".npy", ".nii", ".nii.gz")
"""Of files with one array each, and of which a folder makes one array, a sample each."""


def chunk_shape(shape: Sequence[int], itemsize: int, partition: Partition | None) -> tuple[int, ...]:
    """The chunks for an array (samples, ..., depth, height, width): no chunk is read by two ranks of the partition.

    The last three dims are those of space, as many as there are; the first of a larger array counts samples, of which a
    chunk has one.
    """
    ndim = len(shape)
    space = range(max(ndim - 3, 0), ndim)
    chunk = [max(extent, 1) for extent in shape]
    if space.start:
        chunk[0] = 1
    ranks = {dim: 1 for dim in space}
    for name, size in partition.axes if partition else ():
        if AXES[name].kind is Kind.SPACE and ndim + AXES[name].dim in ranks:
            ranks[ndim + AXES[name].dim] = size
    for dim in space:
        chunk[dim] = -(-chunk[dim] // ranks[dim])
        if partition is None:
            chunk[dim] = min(chunk[dim], CUBE)
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        longest = max(range(ndim), key=lambda dim: (chunk[dim] > 1 and chunk[dim] % 2 == 0, chunk[dim]))
        if chunk[longest] == 1 or chunk[longest] % 2:
            break  # an odd share cut in two would belong to two ranks
        chunk[longest] //= 2
    return tuple(chunk)


@dataclass(frozen=True)
class Original:
    """An array that is to be copied: its name in the copy, and its parts along dim 0, each of which fits in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    parts: Callable[[], Iterator[tuple[int, numpy.ndarray]]]
    """Gives (first position along dim 0, elements)."""


def originals(source: str, key: str) -> list[Original]:
    """What is in a file, or in a folder of files of one array each. ValueError, one line, for what cannot be copied."""
    path = Path(source)
    os.stat(path)
    if path.is_dir() and not any((path / name).exists() for name in ("zarr.json", ".zarray", ".zgroup")):
        return [_of_folder(path, key)]
    if path.name.endswith(".nii.gz"):
        array = _nifti(path)
        return [Original(key or "volume", array.shape, array.dtype, lambda: iter([(0, array)]))]
    if path.suffix in (".npy", ".nii") or path.is_dir() or key:
        return [_lazy(opening.open(path, key if path.suffix not in (".npy", ".nii") else ""), key or "volume")]
    import h5py

    if not h5py.is_hdf5(path):
        raise ValueError(f"{source}: accepted: HDF5, Zarr, {', '.join(SUFFIXES)}, or a folder of such files")
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return [_lazy(opening.open(path, name), name) for name in names]


def _lazy(array: Any, name: str) -> Original:
    if array.dtype.kind not in "biufc":
        raise ValueError(f"{name}: dtype {array.dtype}; accepted: numbers")
    if not array.ndim:
        return Original(
            name, (), array.dtype, lambda: iter([(0, numpy.asarray(array.expression.read((), Source.read)))])
        )
    step = max(CHUNK_BYTES // max(math.prod(array.shape[1:]) * array.dtype.itemsize, 1), 1)

    def parts() -> Iterator[tuple[int, numpy.ndarray]]:
        for start in range(0, array.shape[0], step):
            rows = range(start, min(start + step, array.shape[0]))
            yield start, array.expression.read((rows, *map(range, array.shape[1:])), Source.read)

    return Original(name, array.shape, array.dtype, parts)


def _of_folder(folder: Path, key: str) -> Original:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    if not files:
        raise ValueError(f"{folder}: no files {', '.join(SUFFIXES)} in this folder")
    first = _whole(files[0])

    def parts() -> Iterator[tuple[int, numpy.ndarray]]:
        for place, path in enumerate(files):
            array = _whole(path)
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"{path}: {array.shape}, {array.dtype}; accepted: as {files[0].name}, {first.shape}, {first.dtype}"
                )
            yield place, array[None]

    return Original(key or "volume", (len(files), *first.shape), first.dtype, parts)


def _whole(path: Path) -> numpy.ndarray:
    return numpy.load(path) if path.suffix == ".npy" else _nifti(path)


def _nifti(path: Path) -> numpy.ndarray:
    import nibabel

    return numpy.asarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]


def convert(
    found: Sequence[Original], target: str, partition: Partition | None, progress: Callable[[int], object]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Writes the arrays into a new group of Zarr in the folder `target`, which appears when it is complete.

    `progress` is called with the bytes as they are written. Returns name, shape and chunks of each. ValueError where
    the target is there.
    """
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    if os.path.exists(target):
        raise ValueError(f"{target}: exists already")
    partial = f"{target.rstrip('/')}.{secrets.token_hex(4)}.part"
    written = []
    try:
        group = zarr.open_group(partial, mode="w")
        for original in found:
            chunks = chunk_shape(original.shape, original.dtype.itemsize, partition)
            array = group.create_array(
                original.name,
                shape=original.shape,
                dtype=original.dtype,
                chunks=chunks,
                compressors=(ZstdCodec(level=1), Crc32cCodec()),
            )
            for start, part in original.parts():
                if part.ndim:
                    array[start : start + part.shape[0]] = part
                else:
                    array[...] = part
                progress(part.nbytes)
            written.append((original.name, original.shape, chunks))
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written
