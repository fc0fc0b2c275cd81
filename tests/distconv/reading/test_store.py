"""Epochs from memory against the same epochs from files."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from distconv.agreement.disagreement import Disagreement
from distconv.job import supply
from distconv.job.data import loading
from distconv.reading.fault import ReadError
from distconv.reading.source import Source
from distconv.reading.store import PartStore
from distconv.settings import StoreOption
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh

SAMPLES, SHAPE, EPOCHS = 7, (2, 6, 9, 8), 3
OF_SAMPLE = int(np.prod(SHAPE)) * 4 + int(np.prod(SHAPE[1:])) + 8  # bytes of a volume, a label and an age


def write(folder: Path) -> str:
    rng = np.random.default_rng(2)
    with h5py.File(folder / "v.h5", "w") as file:
        file["volume"] = rng.normal(size=(SAMPLES, *SHAPE)).astype("f4")
        file["age"] = rng.normal(size=(SAMPLES,))
    rng.integers(0, 5, (SAMPLES, *SHAPE[1:])).astype("u1").tofile(folder / "label.raw")
    return str(folder)


class Volumes(Dataset):
    """Volumes with noise that is drawn anew each time, labels and a number."""

    def __init__(self, folder: str, length: int = SAMPLES) -> None:
        self.folder, self.length, self.opened = Path(folder), length, (0, None, None)

    def __len__(self) -> int:
        return self.length

    def open(self) -> tuple[Any, Any]:
        if self.opened[0] != os.getpid():
            labels = np.memmap(self.folder / "label.raw", np.uint8, "r", shape=(SAMPLES, *SHAPE[1:]))
            self.opened = os.getpid(), h5py.File(self.folder / "v.h5", "r"), labels
        return self.opened[1:]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, labels = self.open()
        image = torch.from_numpy(file["volume"][index]) + torch.rand(())
        image.mul_(2)
        return {"image": image, "label": labels[index].astype(np.int64), "age": float(file["age"][index])}


class Centred(Volumes):
    """Needs the whole of a volume, and writes into what it has read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, labels = self.open()
        volume, label = file["volume"][index], torch.from_numpy(labels[index])
        volume -= volume.mean()
        label[0] = 7
        age = file["age"][index : index + 1]
        age += torch.rand(()).item()
        return {"image": torch.from_numpy(volume).mul_(2), "label": label, "age": age}


class Watched(PartStore):
    """Checks that what is brought is what the rank needs and does not hold."""

    made: ClassVar[list[Watched]] = []
    brought_bytes = 0

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        Watched.made.append(self)

    def end_batch(self, owned: Any) -> None:
        needed = {key for asked in self._asked.values() for key in asked if key not in self._parts}
        if self.bytes_read == self.before:
            assert set(self._received) == needed
        self.brought_bytes += sum(part.nbytes for part in self._received.values())
        self.before = self.bytes_read
        super().end_batch(owned)

    before = 0


BEGUN: list[Any] = []
"""Exchanges that began while a step computes."""


def locals_of(batch: dict[str, Any]) -> list[torch.Tensor]:
    return [value.to_local() if isinstance(value, DTensor) else value for value in batch.values()]


def read(
    partition: str, folder: str, workers: int, start: str | None, option: StoreOption | None, kind: type[Volumes]
) -> Any:
    """What each epoch gives this rank, how many bytes were read from files until its end, and the store."""
    reads = multiprocessing.Value("q", 0)
    plain = Source.read

    def counted(source: Source, wanted: Any) -> Any:
        part = plain(source, wanted)
        with reads.get_lock():
            reads.value += part.nbytes
        return part

    Watched.made.clear()
    BEGUN.clear()
    begin = supply.begun_in_thread
    torch.manual_seed(3)
    epochs, bytes_read = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "read", counted)
        patch.setattr(supply, "PartStore", Watched)
        patch.setattr(supply, "begun_in_thread", lambda function: BEGUN.append(function) or begin(function))
        with loading(make_mesh(Partition.parse(partition)), shard=True, store=option):
            loader = DataLoader(
                kind(folder), 3, shuffle=True, num_workers=workers, multiprocessing_context=start,
                persistent_workers=bool(workers),
            )  # fmt: skip
            for _ in range(EPOCHS):
                epochs.append([locals_of(batch) for batch in loader])
                bytes_read.append(reads.value)
    return epochs, bytes_read, Watched.made[0] if option else None


def compare(
    partition: str, folder: str, workers: int, start: str | None, option: StoreOption, kind: type[Volumes] = Volumes
) -> Any:
    """Bytes read from files and brought from other ranks with a store, when batches are those without one."""
    expected, without, _ = read(partition, folder, workers, start, None, kind)
    found, bytes_read, store = read(partition, folder, workers, start, option, kind)
    assert without[-1] > 0 or start == "spawn"
    for epoch, plain in zip(found, expected, strict=True):
        assert len(epoch) == len(plain) == 3
        for batch, others in zip(epoch, plain, strict=True):
            for one, other in zip(batch, others, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(found[0][0][0], found[1][0][0])
    return bytes_read, store.bytes, store.bytes_read, store.brought_bytes, len(BEGUN)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("partition", "workers", "start"),
    [("sample=2", 0, None), ("sample=2,depth=2", 0, None), ("depth=2", 0, None), ("sample=2", 1, "fork"),
     ("sample=2", 1, "spawn")],
)  # fmt: skip
def test_batches_are_those_without_a_store_and_later_epochs_read_nothing(ranks, tmp_path, partition, workers, start):
    parsed = Partition.parse(partition)
    results = ranks(parsed.ranks).run(compare, partition, write(tmp_path), workers, start, StoreOption(1.0, False))
    for bytes_read, _, answered, _, _ in results:
        assert bytes_read[0] == bytes_read[1] == bytes_read[2]
        assert bytes_read[0] > 0 or start == "spawn"
        if not workers:
            # The last batch has one sample, which the rank without one reads as well.
            assert answered <= OF_SAMPLE * (SAMPLES / 2 + 1.5) * (1 if partition == "sample=2" else 1.01)
    if not workers:
        copies = sum(kept for _, kept, *_ in results)
        age = 8 * (parsed.ranks // dict(parsed.axes).get("sample", 1) - 1) * SAMPLES  # is on all ranks of a sample
        assert copies == OF_SAMPLE * SAMPLES + age
    if "sample" in partition:
        for *_, brought, ahead in results:
            assert brought > 0 and 2 <= ahead <= (EPOCHS - 1) * 2  # of each epoch's three batches not the first


@pytest.mark.gloo
def test_what_a_dataset_writes_into_is_not_what_is_kept(ranks, tmp_path):
    option = StoreOption(1.0, False)
    for bytes_read, *_ in ranks(2).run(compare, "sample=2", write(tmp_path), 0, None, option, Centred):
        assert bytes_read[0] == bytes_read[2]


def test_a_store_over_mpi(ranks, tmp_path):
    """The exchange runs in a thread, which MPI has to bear."""
    if ranks(2).backend == "gloo":
        pytest.skip("as above")
    ranks(2).run(compare, "sample=2", write(tmp_path), 0, None, StoreOption(1.0, False))


def read_little(folder: str, option: StoreOption) -> str:
    with loading(make_mesh(Partition.parse("sample=2")), shard=True, store=option):
        try:
            for _ in DataLoader(Volumes(folder), 3):
                raise AssertionError("a batch came before the refusal")
        except ReadError as error:
            return str(error)
    return ""


@pytest.mark.gloo
def test_what_does_not_fit_is_refused_before_the_first_batch_or_read_from_files(ranks, tmp_path):
    folder, gib = write(tmp_path), 8000 / (1 << 30)
    lines = ranks(2).run(read_little, folder, StoreOption(gib, False))
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    assert f"--store memory={gib:g}" in lines[0] and "v.h5: /volume" in lines[0] and "memory+disk" in lines[0]
    for bytes_read, kept, *_ in ranks(2).run(compare, "sample=2", folder, 0, None, StoreOption(gib, True)):
        assert 0 < kept <= 8000
        assert 0 < bytes_read[2] - bytes_read[1] < bytes_read[0]


def read_in_turns(folder: str) -> None:
    """Two loaders at a time, and epochs that are left early, with a store and without."""
    epochs: list[list[Any]] = []
    for option in (None, StoreOption(1.0, False)):
        torch.manual_seed(0)
        epochs.append([])
        with loading(make_mesh(Partition.parse("sample=2")), shard=True, store=option):
            one, two = DataLoader(Volumes(folder), 3, shuffle=True), DataLoader(Centred(folder), 2, shuffle=True)
            for _ in range(EPOCHS):
                for both in zip(one, two, strict=False):
                    epochs[-1] += [part for batch in both for part in locals_of(batch)]
                epochs[-1] += locals_of(next(iter(two)))
    assert len(epochs[0]) == len(epochs[1]) > 0
    for part, other in zip(*epochs, strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0)


@pytest.mark.gloo
def test_loaders_in_turns_and_epochs_that_are_left(ranks, tmp_path):
    ranks(2).run(read_in_turns, write(tmp_path))


class Drawn(Dataset):
    """Reads no files."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def read_more(folder: str, other: str) -> tuple[str, int, int]:
    """What is told when data sets come that cannot be kept, or only in part, after one that is."""
    told, option = io.StringIO(), StoreOption(OF_SAMPLE * 5 / (1 << 30), False)
    with (
        contextlib.redirect_stderr(told),
        loading(make_mesh(Partition.parse("sample=2")), shard=True, store=option) as x,
    ):
        for dataset in (Volumes(folder), Volumes(other), Drawn()):
            loader = DataLoader(dataset, 4)
            assert sum(1 for _ in loader) == len(loader)
        return told.getvalue(), x.supply.store.bytes, x.supply.store.limit


@pytest.mark.gloo
def test_a_later_data_set_that_does_not_fit_is_reported_and_read(ranks, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    for told, kept, limit in ranks(2).run(read_more, str(tmp_path / "one"), str(tmp_path / "other")):
        first, second = told.splitlines()
        assert first.startswith("distconv: --store keeps ") and f"such as of {tmp_path / 'other'}" in first
        assert second.startswith("distconv: --store keeps nothing of this data set")
        assert limit - OF_SAMPLE < kept <= limit


class Apart(Volumes):
    def __len__(self) -> int:
        return 4 if torch.distributed.get_rank() else 6


def read_apart(folder: str) -> str:
    with loading(make_mesh(Partition.parse("sample=2")), shard=True, store=StoreOption(1.0, False)):
        list(DataLoader(Volumes(folder, 6), 2))
        try:
            list(DataLoader(Apart(folder), 2))
        except Disagreement as error:
            return str(error)
    return ""


@pytest.mark.gloo
def test_other_batches_on_another_rank_are_found_and_nobody_waits(ranks, tmp_path):
    lines = ranks(2).run(read_apart, write(tmp_path))
    assert len(set(lines)) == 1 and "rank 0 has" in lines[0] and "[4, 5]" in lines[0]
