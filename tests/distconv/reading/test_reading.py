"""DataLoaders of ranks that read their parts of files, against one process that reads all."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import distconv
from distconv.agreement.disagreement import Disagreement
from distconv.job.data import loading
from distconv.reading.fault import ReadError
from distconv.reading.source import Source
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh

pytestmark = pytest.mark.gloo

HAS_ZARR = importlib.util.find_spec("zarr") is not None
if HAS_ZARR:
    import zarr

SAMPLES, SHAPE = 7, (2, 6, 9, 8)


def write(folder: Path, kind: str) -> str:
    rng = np.random.default_rng(1)
    volumes = rng.normal(size=(SAMPLES, *SHAPE)).astype("f4")
    labels = rng.integers(0, 5, (SAMPLES, *SHAPE[1:])).astype("u1")
    if kind == "hdf5":
        with h5py.File(folder / "v.h5", "w") as file:
            file.create_dataset("a/volume", data=volumes, chunks=(1, 2, 3, 9, 8), compression="gzip", fletcher32=True)
            file["label"] = labels
    elif kind == "zarr":
        root = zarr.open_group(str(folder / "v.zarr"), mode="w")
        root.create_array("a/volume", data=volumes, chunks=(1, 1, 3, 4, 8))
        root.create_array("label", data=labels, chunks=(2, 3, 9, 8))
    else:
        np.save(folder / "volume.npy", volumes)
        labels.tofile(folder / "label.raw")
    return str(folder)


class Volumes(Dataset):
    """Opens its files when the first sample is asked for, as a Dataset with workers does."""

    def __init__(self, folder: str, kind: str, length: int = SAMPLES) -> None:
        self.folder, self.kind, self.length = Path(folder), kind, length
        self.file: Any = None

    def __len__(self) -> int:
        return self.length

    def open(self) -> tuple[Any, Any]:
        if self.kind == "hdf5":
            file = h5py.File(self.folder / "v.h5", "r")
            return file["a/volume"], file["label"]
        if self.kind == "zarr":
            root = zarr.open_group(str(self.folder / "v.zarr"), mode="r")
            return root["a/volume"], root["label"]
        volumes = np.load(self.folder / "volume.npy", mmap_mode="r")
        return volumes, np.memmap(self.folder / "label.raw", np.uint8, "r", shape=(SAMPLES, *SHAPE[1:]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file = self.file or self.open()
        volumes, labels = self.file
        crop = index % 2
        image = torch.from_numpy(np.ascontiguousarray(volumes[index][:, :, crop : crop + 8])).flip(-1)
        return {"image": (image - 0.25) / 2, "label": labels[index].astype(np.int64)[:, 1:], "index": index}


def batches(loader: DataLoader) -> list[dict[str, torch.Tensor]]:
    return [
        {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        for batch in loader
    ]


def read(folder: str, kind: str, workers: int, start: str | None) -> tuple[Any, Any]:
    """The first batch of an epoch, and then a whole epoch."""
    loader = DataLoader(
        Volumes(folder, kind), 3, shuffle=True, num_workers=workers, multiprocessing_context=start,
        persistent_workers=bool(workers),
    )  # fmt: skip
    first = next(iter(loader))
    torch.manual_seed(0)
    return first, batches(loader)


def read_on_ranks(partition: str, folder: str, kind: str, workers: int, start: str | None) -> Any:
    mesh = make_mesh(Partition.parse(partition))
    bytes_read = 0
    plain = Source.read

    def counted(source: Source, wanted: Any) -> Any:
        nonlocal bytes_read
        part = plain(source, wanted)
        bytes_read += part.nbytes
        return part

    with loading(mesh, shard=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "read", counted)
        first, found = read(folder, kind, workers, start)
    return found, [str(first[name].placements) for name in ("image", "label")], bytes_read


CASES = [
    ("sample=2,depth=2", "hdf5", 0, None),
    ("depth=2,height=2", "raw", 0, None),
    ("sample=2,width=2", "zarr", 0, None),
    ("depth=2", "hdf5", 1, "fork"),
    ("sample=2", "raw", 0, None),
    ("depth=2", "raw", 1, "spawn"),
    ("height=2", "zarr", 1, "forkserver"),
]


@pytest.mark.parametrize(("partition", "kind", "workers", "start"), CASES)
def test_batches_are_those_of_one_process(ranks, tmp_path, partition, kind, workers, start):
    if kind == "zarr" and not HAS_ZARR:
        pytest.skip("zarr is not installed")
    if ranks(2).backend == "mpi" and (partition, workers) != ("sample=2,depth=2", 0):
        pytest.skip("as over Gloo")
    folder = write(tmp_path, kind)
    _, expected = read(folder, kind, workers, start and "fork")
    parsed = Partition.parse(partition)
    whole = (SAMPLES + 3) * np.prod(SHAPE[1:]) * (4 * SHAPE[0] + 1)  # an epoch, and a batch before it
    shares = []
    for found, layouts, bytes_read in ranks(parsed.ranks).run(read_on_ranks, partition, folder, kind, workers, start):
        for batch, plain in zip(found, expected, strict=True):
            assert batch.keys() == plain.keys()
            for name, value in batch.items():
                torch.testing.assert_close(value, plain[name], rtol=0, atol=0)
        for axis in parsed.names:
            dim = {"sample": 0, "depth": 2, "height": 3, "width": 4}[axis]
            assert f"Shard(dim={dim})" in layouts[0] and f"Shard(dim={max(dim - 1, 0)})" in layouts[1]
        shares.append(bytes_read)
    if not workers and "sample" not in parsed.names:
        assert sum(shares) <= whole and max(shares) <= whole * 1.2 / parsed.ranks  # the shards are not all as large


class Broken(Volumes):
    """Samples that cannot be read, or only by some."""

    def __init__(self, folder: str, how: str) -> None:
        super().__init__(folder, "hdf5")
        self.how = how

    def __getitem__(self, index: int) -> Any:
        rank = torch.distributed.get_rank()
        if self.how == "a missing file" and rank == 1:
            return h5py.File(self.folder / "absent.h5", "r")["volume"][index]
        file = h5py.File(self.folder / "v.h5", "r")
        if self.how == "a missing key":
            return file["volumes"][index]
        if self.how == "another shape" and index == 0:  # the others of the batch are alike
            return file["a/volume"][index][:, 1:]
        if self.how == "a dtype":
            return torch.from_numpy(file["a/volume"][index].astype(">f4"))
        if self.how == "other indices" and rank:
            return file["a/volume"][(index + 1) % SAMPLES]
        return file["a/volume"][index]


def read_broken(partition: str, folder: str, how: str) -> str:
    mesh = make_mesh(Partition.parse(partition))
    with loading(mesh, shard=True):
        try:
            list(DataLoader(Broken(folder, how), 3))
        except (ReadError, Disagreement) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "tells"),
    [
        ("a missing file", ("ReadError", "absent.h5", "sample 0", "No such file")),
        ("a missing key", ("ReadError", "v.h5: 'volumes'", "sample 0")),
        ("another shape", ("ReadError", "v.h5: '/a/volume', sample 0", "here, [2, 5, 9, 8]")),
        ("a dtype", ("ReadError", "v.h5: '/a/volume', sample 0", "byte order")),
        ("a checksum", ("ReadError", "v.h5: '/a/volume', sample 0", "failure during read")),
        ("a truncated file", ("ReadError", "v.h5", "sample 0", "truncated")),
        ("other indices", ("Disagreement", "the files, or their parts", "[0, 1, 2]", "ranks 0 and 1")),
    ],
)
def test_one_line_on_all_ranks(ranks, tmp_path, how, tells):
    if ranks(2).backend == "mpi" and how != "a missing file":
        pytest.skip("as over Gloo")
    folder = write(tmp_path, "hdf5")
    path = tmp_path / "v.h5"
    if how == "a checksum":
        with h5py.File(path, "r") as file:
            chunk = file["a/volume"].id.get_chunk_info(0)
        with path.open("r+b") as raw:
            raw.seek(chunk.byte_offset + chunk.size - 20)
            raw.write(b"\xff" * 8)
    if how == "a truncated file":
        os.truncate(path, path.stat().st_size - 1000)
    lines = ranks(2).run(read_broken, "depth=2", folder, how)
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    for text in tells:
        assert text in lines[0], lines[0]


def cut(path: str) -> tuple[torch.Tensor, torch.Size]:
    mesh = distconv.init("depth=2", device_type="cpu")
    x = distconv.shard(distconv.open(path, "a/volume")[2:4].astype("f8") * 2, mesh)
    return x.full_tensor(), x.to_local().shape


def test_a_program_opens_and_shards(ranks, tmp_path):
    path = str(Path(write(tmp_path, "hdf5")) / "v.h5")
    with h5py.File(path, "r") as file:
        expected = torch.from_numpy(file["a/volume"][2:4].astype("f8") * 2)
    for found, shape in ranks(2).run(cut, path):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert shape == (2, 2, 3, 9, 8)


def test_what_cannot_be_opened_is_reported(tmp_path):
    path = Path(write(tmp_path, "hdf5")) / "v.h5"
    with pytest.raises(ValueError, match=r"no array 'b'; accepted: a/volume, label"):
        distconv.open(path, "b")
    (tmp_path / "v.nii.gz").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a file that can be read in parts"):
        distconv.open(tmp_path / "v.nii.gz")
    np.save(tmp_path / "v.npy", np.arange(24.0).reshape(2, 3, 4))
    np.testing.assert_array_equal(
        np.asarray(distconv.open(tmp_path / "v.npy")[1:]), np.arange(12.0, 24).reshape(1, 3, 4)
    )
