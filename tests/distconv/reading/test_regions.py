"""Regions of arrays in files, read in one piece each where that pays: what is in them, and what a disk is asked for."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.reading import regions
from distconv.reading.source import Hdf5, Raw

CHUNK = (1, 4, 32, 64, 64)  # 2 MiB
SHAPE = (2, 6, 64, 64, 80)  # the last chunks along dims 1 and 4 are larger than what is left of the array


@st.composite
def drawn_regions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[range, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    region = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        region.append(range(start, draw(st.integers(start + 1, extent)), draw(st.integers(1, 2))))
    return shape, tuple(region)


@given(drawn_regions(), st.sampled_from(["C", "F"]))
def test_runs_are_the_region(tmp_path_factory: pytest.TempPathFactory, case: object, order: str) -> None:
    shape, region = case  # type: ignore[misc]
    array = np.asarray(np.arange(np.prod(shape), dtype="i4").reshape(shape), order=order)  # type: ignore[call-overload]
    path = tmp_path_factory.getbasetemp() / "raw"
    path.write_bytes(b"head" + array.tobytes(order))  # type: ignore[arg-type]
    with path.open("rb") as file:
        turned = slice(None, None, 1 if order == "C" else -1)
        found = regions.read_region(file.fileno(), 4, shape[turned], array.dtype, region[turned])
    expected = array[tuple(slice(at.start, at.stop, at.step) for at in region)]
    np.testing.assert_array_equal(found if order == "C" else found.transpose(), expected)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("volumes") / "v.h5"
    array = np.random.default_rng(0).integers(0, 99, SHAPE).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("plain", data=array, chunks=CHUNK)
        file.create_dataset("packed", data=array, chunks=CHUNK, compression="gzip", compression_opts=1)
        file.create_dataset("turned", data=array.astype(">f4"), chunks=CHUNK)
        partly = file.create_dataset("partly", SHAPE, "f4", chunks=CHUNK, fillvalue=7)
        partly[0, :, :32] = array[0, :, :32]
    return path, array


@pytest.mark.parametrize("key", ["plain", "packed", "turned", "partly"])
def test_chunks_are_the_region(volumes: tuple[Path, np.ndarray], key: str) -> None:
    path, array = volumes
    if key == "partly":
        array = np.where(np.arange(SHAPE[2])[:, None, None] < 32, array, np.float32(7))
        array[1] = 7
    dtype = ">f4" if key == "turned" else "f4"
    source = Hdf5(str(path), f"/{key}", SHAPE, np.dtype(dtype))
    boxes = {
        "whole chunks": (range(0, 1), range(6), range(0, 64), range(64), range(80)),
        "a half": (range(1, 2), range(6), range(32, 64), range(64), range(80)),
        "one chunk": (range(0, 1), range(0, 4), range(32, 64), range(64), range(64)),
        "parts of chunks": (range(0, 2), range(1, 5), range(16, 48), range(64), range(3, 70)),
        "every other": (range(0, 2), range(6), range(0, 64, 2), range(64), range(0, 80, 2)),
    }
    for name, box in boxes.items():
        expected = array[tuple(slice(at.start, at.stop, at.step) for at in box)]
        np.testing.assert_array_equal(source.read(box), expected, err_msg=name)


def test_which_chunks_are_read_past_the_cache(volumes: tuple[Path, np.ndarray]) -> None:
    with h5py.File(volumes[0], "r") as file:
        assert {key: regions.are_plain(file[key]) for key in file} == {
            **{"plain": True, "turned": True, "partly": True, "packed": False}
        }
        assert regions.are_large(file["plain"])
    whole = tuple(map(range, SHAPE))
    assert regions.are_whole(whole, SHAPE, CHUNK)
    assert not regions.are_whole((*whole[:2], range(0, 16), *whole[3:]), SHAPE, CHUNK)
    assert not regions.are_whole((*whole[:2], range(0, 64, 2), *whole[3:]), SHAPE, CHUNK)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, volumes: tuple[Path, np.ndarray]) -> None:
    shape = (4, 256, 256)
    path = tmp_path / "raw"
    np.zeros(shape, "f4").tofile(path)
    source = Raw(str(path), "", shape, np.dtype("f4"), 0, "C")
    box = (range(2, 4), range(256), range(256))
    assert not source.read(box).any()
    os.truncate(path, 3 * 256 * 256 * 4 + 100)
    with pytest.raises(OSError, match="the array ends at"):
        source.read(box)
    with path.open("rb") as file, pytest.raises(OSError, match="the file ends at byte"):
        regions.read_region(file.fileno(), 0, shape, np.dtype("f4"), box)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_the_disk_is_asked_for_a_slab_alone(tmp_path: Path) -> None:
    """Of a chunk and of a run that lie in the middle of a file, nothing around them comes into the cache."""
    array = np.ones((1, 4, 1 << 20), "f4")  # 16 MiB; a row of 4 MiB is read, in four chunks or in one run
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("v", data=array, chunks=(1, 1, 1 << 18))
    array.tofile(tmp_path / "raw")
    raw = Raw(str(tmp_path / "raw"), "", array.shape, array.dtype, 0, "C")
    for source in (Hdf5(str(tmp_path / "v.h5"), "/v", array.shape, array.dtype), raw):
        with open(source.path, "rb") as written:
            os.fsync(written.fileno())
            box = (range(1), range(1, 2), range(1 << 20))
            source._array((0,))  # opened, with what is read for that
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if _cached(source.path) > 64 << 10:
                pytest.skip("the system keeps the pages all the same")
            source.read(box)
            assert _cached(source.path) <= (4 << 20) + (64 << 10), type(source).__name__


def _cached(path: str) -> int:
    """Bytes of a file that are in the cache of pages (mincore)."""
    import ctypes

    size = os.path.getsize(path)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    held = ctypes.c_char.from_buffer(mapped)
    asked = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), seen
    )
    del held
    assert asked == 0, ctypes.get_errno()
    return sum(each & 1 for each in seen) * mmap.PAGESIZE
