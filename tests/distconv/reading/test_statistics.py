"""Samples that are normalised by what is computed of them: ranks with the same sample read a slab each."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from distconv.job.data import loading
from distconv.reading.source import Source
from distconv.settings import StoreOption
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh

SAMPLES, SHAPE, EPOCHS = 5, (2, 6, 9, 8), 2
OF_SAMPLE = 2 * int(np.prod(SHAPE))  # bytes


def of_numpy(volume: Any) -> Any:
    volume = volume.astype("f4")
    low, high = np.percentile(volume, [1, 99])
    volume = np.clip(volume, low, high)
    return torch.from_numpy((volume - volume.mean()) / (np.sqrt(volume.var()) + 1e-6))


def of_channels(volume: Any) -> Any:
    x = torch.from_numpy(np.ascontiguousarray(volume.astype("f4").transpose(0, 3, 1, 2)))
    x = x.flip(-1)
    return (x - x.mean(dim=(1, 2, 3), keepdim=True)) / x.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)


def in_steps(volume: Any) -> Any:
    volume = volume[:, :, 1:].astype("f8")
    volume -= volume.min()
    volume /= np.median(volume)
    x = torch.from_numpy(volume).float()
    return x.sub_(x.mean()).mul(2) / x.amax()


def of_a_view(volume: Any) -> Any:
    view = torch.from_numpy(volume.astype("f4"))[:, 1:5].permute(0, 3, 2, 1)
    return view - torch.quantile(view, torch.tensor([0.25]))


def at_once(volume: Any) -> Any:
    volume = volume.astype("f4")
    deviation, means = float(volume.std()), volume.mean(axis=(1, 2, 3))
    volume = volume / (deviation if deviation > 0 else 1) - means[0]
    assert float(means[0]) > 0
    means += 1  # what is kept stays as it is
    return torch.from_numpy(volume)


WAYS = {way.__name__: way for way in (of_numpy, of_channels, in_steps, of_a_view, at_once)}


class Volumes(Dataset):
    def __init__(self, path: str, way: str) -> None:
        self.path, self.way, self.opened = path, way, (0, None)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.opened[0] != os.getpid():
            self.opened = os.getpid(), h5py.File(self.path, "r")["volume"]
        return WAYS[self.way](self.opened[1][index]), index


def write(folder: Path) -> str:
    with h5py.File(folder / "v.h5", "w") as file:
        volumes = np.random.default_rng(4).integers(0, 2000, (SAMPLES, *SHAPE), dtype="u2")
        file.create_dataset("volume", data=volumes)
    return str(folder / "v.h5")


def epochs(path: str, way: str, workers: int) -> Any:
    """The batches of each epoch, and what has been read of files when it ends."""
    reads, plain, found, counts = multiprocessing.Value("q", 0), Source.read, [], []

    def counted(source: Source, wanted: Any) -> Any:
        part = plain(source, wanted)
        with reads.get_lock():
            reads.value += part.nbytes
        return part

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "read", counted)
        loader = DataLoader(Volumes(path, way), 2, shuffle=True, num_workers=workers)
        for _ in range(EPOCHS):
            before = reads.value
            found.append([x.full_tensor() if isinstance(x, DTensor) else x for x, _ in loader])
            counts.append(reads.value - before)
    return found, counts


def on_ranks(partition: str, path: str, way: str, workers: int, store: bool) -> Any:
    told = io.StringIO()
    option = StoreOption(1.0, False) if store else None
    with (
        contextlib.redirect_stderr(told),
        loading(make_mesh(Partition.parse(partition)), shard=True, store=option),
    ):
        return *epochs(path, way, workers), told.getvalue()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("partition", "way", "workers", "store"),
    [
        ("depth=2", "of_numpy", 0, False),
        ("sample=2,depth=2", "of_numpy", 0, True),
        ("depth=2,channel=2", "of_channels", 0, False),
        ("height=2", "of_channels", 1, False),
        ("depth=2", "in_steps", 0, True),
        ("sample=2,width=2", "in_steps", 1, True),
        ("width=2", "of_a_view", 0, False),
        ("depth=2", "at_once", 0, False),
    ],
)
def test_batches_are_those_of_one_process_and_each_rank_reads_its_slabs(
    ranks, tmp_path, partition, way, workers, store
):
    path, parsed = write(tmp_path), Partition.parse(partition)
    expected, _ = epochs(path, way, 0)
    space = math.prod(size for name, size in parsed.axes if name not in ("sample", "channel"))
    for found, counts, told in ranks(parsed.ranks).run(on_ranks, partition, path, way, workers, store):
        for epoch, plain in zip(found, expected, strict=True):
            for batch, other in zip(epoch, plain, strict=True):
                torch.testing.assert_close(batch, other, rtol=0, atol=0)
        # Of the shares of uneven parts, and of a batch whose last sample is read by all for want of another one.
        samples = SAMPLES if "sample" not in partition else (SAMPLES + 1) // 2
        share = samples * OF_SAMPLE / space * 1.12
        if way == "at_once":
            assert "float needs the whole" in told and counts[0] >= SAMPLES * OF_SAMPLE
        else:
            assert told == ""
            # What a transposed or cropped volume is computed of may be another slab than the one that is passed on.
            assert counts[0] <= share * (1 if way == "of_numpy" else 2)
        assert counts[1] == 0 if store else counts[1] <= share * (2 if workers and "sample" in partition else 1)


def on_ranks_with_copies(partition: str, path: str, way: str) -> Any:
    """As `on_ranks`, where each rank has a copy of the file, as on a disk of its own machine."""
    stamp, rank = Source.stamp, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "stamp", lambda source: (*(stamp(source) or ()), rank))
        return on_ranks(partition, path, way, 0, False)


@pytest.mark.gloo
def test_each_machine_may_have_a_copy_of_the_files(ranks, tmp_path):
    path = write(tmp_path)
    expected, _ = epochs(path, "of_numpy", 0)
    for found, _, told in ranks(4).run(on_ranks_with_copies, "sample=2,depth=2", path, "of_numpy"):
        assert told == ""
        for epoch, plain in zip(found, expected, strict=True):
            for batch, other in zip(epoch, plain, strict=True):
                torch.testing.assert_close(batch, other, rtol=0, atol=0)
