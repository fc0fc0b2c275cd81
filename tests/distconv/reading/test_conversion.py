from __future__ import annotations

import gzip
import importlib.util
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.reading.conversion import CHUNK_BYTES, chunk_shape
from distconv.settings.partition import Partition, ownership
from tests.forked_python import run_python

needs_zarr = pytest.mark.skipif(importlib.util.find_spec("zarr") is None, reason="zarr is not installed")


@given(
    shape=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    ranks=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
    itemsize=st.sampled_from([1, 4, 8]),
)
def test_no_chunk_belongs_to_two_ranks(shape: list[int], ranks: list[int], itemsize: int) -> None:
    partition = Partition(tuple(zip(("depth", "height", "width"), ranks, strict=True)))
    chunks = chunk_shape(shape, itemsize, partition)
    assert len(chunks) == len(shape) and all(1 <= chunk <= extent for chunk, extent in zip(chunks, shape, strict=True))
    for dim, size in zip(range(-3, 0), ranks, strict=True):
        if -dim <= len(shape):
            for start, stop in ownership(shape[dim], size):
                assert start == stop or start % chunks[dim] == 0
    assert len(shape) < 4 or chunks[0] == 1


def test_chunks_are_small() -> None:
    assert chunk_shape((8, 4, 512, 512, 512), 2, None) == (1, 4, 64, 64, 64)
    chunks = chunk_shape((8, 4, 512, 512, 512), 2, Partition.parse("depth=4"))
    assert np.prod(chunks) * 2 <= CHUNK_BYTES


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "distconv", "convert", *arguments)


@needs_zarr
def test_a_file_and_a_folder(tmp_path: Path) -> None:
    import zarr

    volumes = np.random.default_rng(0).normal(size=(3, 2, 8, 6, 4)).astype("f4")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["a/volume"], file["scale"] = volumes, 2.5
    done = run(tmp_path / "v.h5", tmp_path / "v.zarr", "--partition", "depth=2")
    assert done.returncode == 0 and "chunks (1, 2, 4, 6, 4)" in done.stdout, done.stderr
    root = zarr.open_group(str(tmp_path / "v.zarr"), mode="r")
    np.testing.assert_array_equal(root["a/volume"][...], volumes)
    assert root["scale"][...] == 2.5
    (chunk,) = [path for path in (tmp_path / "v.zarr" / "a" / "volume").glob("c/0/0/1/0/0")]
    chunk.write_bytes(b"x" + chunk.read_bytes()[1:])
    with pytest.raises(ValueError, match="checksum"):
        root["a/volume"][0]
    again = run(tmp_path / "v.h5", tmp_path / "v.zarr")
    assert again.returncode == 2 and again.stderr.splitlines()[-1].endswith("exists already")

    for index, volume in enumerate(volumes):
        (tmp_path / "cases").mkdir(exist_ok=True)
        np.save(tmp_path / "cases" / f"{index}.npy", volume)
    assert run(tmp_path / "cases", tmp_path / "cases.zarr").returncode == 0
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "cases.zarr"), mode="r")["volume"][...], volumes)
    np.save(tmp_path / "cases" / "3.npy", volumes[0, :1])
    failed = run(tmp_path / "cases", tmp_path / "other.zarr")
    assert failed.returncode == 2 and "3.npy: (1, 8, 6, 4), float32; accepted: as 0.npy" in failed.stderr
    assert not [path for path in tmp_path.iterdir() if "other" in path.name]


@needs_zarr
def test_compressed_nifti(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    import zarr

    import distconv

    volume = np.arange(5 * 6 * 7, dtype="i2").reshape(5, 6, 7)
    image = nibabel.Nifti1Image(volume, np.eye(4))
    image.header.set_slope_inter(0.5, 3)
    nibabel.save(image, tmp_path / "v.nii")
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress((tmp_path / "v.nii").read_bytes()))
    expected = nibabel.load(tmp_path / "v.nii").get_fdata()
    assert run(tmp_path / "v.nii.gz", tmp_path / "v.zarr").returncode == 0
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "v.zarr"), mode="r")["volume"][...], expected)
    np.testing.assert_array_equal(np.asarray(distconv.open(tmp_path / "v.nii")[1:3]), expected[1:3])


def test_what_cannot_be_converted_is_told(tmp_path: Path) -> None:
    if importlib.util.find_spec("zarr") is None:
        failed = run(tmp_path / "absent.h5", tmp_path / "v.zarr")
        assert failed.returncode == 2 and failed.stderr.startswith("distconv: convert needs zarr")
        return
    for name, content in (("absent.h5", None), ("records.tfrecord", b"records")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        failed = run(tmp_path / name, tmp_path / "v.zarr")
        assert failed.returncode == 2 and len(failed.stderr.splitlines()) == 1 and name in failed.stderr
