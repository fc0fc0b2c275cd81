"""Opens arrays in files by their path for a program; `distconv.shard` cuts them."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.reading import array_functions
from distconv.reading.array import LazyArray
from distconv.reading.expression import Converted, Stored
from distconv.reading.source import Hdf5, Raw, Source, ZarrStore
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_box
from distconv.tensors.mesh import placements

_FUNCTIONS = array_functions  # imported, they are known

ACCEPTED = "accepted: HDF5, a folder of Zarr, .npy, and .nii without compression"


def open(path: str | os.PathLike[str], key: str = "") -> Any:
    """An array in a file, of which nothing is read yet.

    It is indexed, cast and computed with as NumPy's arrays are; `distconv.shard` reads this rank's part of the result
    alone, and `numpy.asarray` reads all of it.

    Args:
        path: an HDF5 file, a folder of Zarr, a .npy file, or a NIfTI file without compression, whose dims are then
            those of nibabel's `dataobj` and whose elements are scaled as there.
        key: the name of the array in a file of several.

    Raises:
        ValueError: one line, for a file of another kind, and where there is no such array.
        OSError: where the file cannot be opened.
    """
    name = os.path.abspath(os.fspath(path))
    os.stat(name)
    suffixes = "".join(Path(name).suffixes[-2:])
    if os.path.isdir(name):
        return LazyArray(Stored(_zarr(name, key)))
    if suffixes.endswith(".npy"):
        mapped = numpy.load(name, mmap_mode="r")
        order = "C" if mapped.flags.c_contiguous else "F"
        return LazyArray(Stored(Raw(name, "", mapped.shape, mapped.dtype, mapped.offset, order)))
    if suffixes.endswith(".nii"):
        return _nifti(name)
    return LazyArray(Stored(_hdf5(name, key)))


def _hdf5(path: str, key: str) -> Source:
    import h5py

    if not h5py.is_hdf5(path):
        raise ValueError(f"{path}: not a file that can be read in parts; {ACCEPTED}")
    with h5py.File(path, "r") as file:
        found = file.get(key) if key else None
        if not isinstance(found, h5py.Dataset):
            names: list[str] = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            raise ValueError(f"{path}: no array {key!r}; accepted: {', '.join(names) or 'none, it has no array'}")
        return Hdf5(path, found.name, found.shape, found.dtype)


def _zarr(path: str, key: str) -> Source:
    import zarr

    try:
        found = zarr.open(path, path=key or None, mode="r")
    except (FileNotFoundError, KeyError):
        found = None
    if not isinstance(found, zarr.Array):
        raise ValueError(f"{path}: no array {key!r} of Zarr; {ACCEPTED}")
    return ZarrStore(path, found.store_path.path, found.shape, found.dtype)


def _nifti(path: str) -> LazyArray:
    import nibabel

    data: Any = nibabel.load(path).dataobj  # type: ignore[attr-defined]
    raw = Raw(path, "", tuple(data.shape), numpy.dtype(data.dtype), int(data.offset), "F")
    if raw.offset + raw.dtype.itemsize * math.prod(raw.shape) > os.path.getsize(path):
        raise ValueError(f"{path}: the file is shorter than its header says")
    array: Any = LazyArray(Stored(raw))
    if (data.slope, data.inter) != (1, 0):
        array = array * numpy.float64(data.slope) + numpy.float64(data.inter)
    return array


def read_shard(array: LazyArray, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a lazy array (N, C, spatial...), and nothing else, read and on the mesh."""
    layout = placements(mesh, array.ndim)
    box = local_box(mesh, layout, array.shape)
    local = Converted(array.expression).read(tuple(range(*each) for each in box), Source.read)
    return wrap(local.contiguous().to(mesh.device_type), mesh, layout, array.shape)


def identity(array: LazyArray) -> Tensor:
    """A number that is the same where the same part of the same file is read."""
    return torch.tensor([zlib.crc32("\n".join(array.expression.described()).encode())], device="cpu")
