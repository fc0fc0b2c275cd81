from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distconv.job.data import loading, too_many_workers
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh


def mesh_of(partition: str):
    return make_mesh(Partition.parse(partition))


class Counted(Dataset):
    """Images and labels, and which of them were read."""

    def __init__(self, length: int, noise: bool = False) -> None:
        self.length, self.noise, self.read = length, noise, set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        self.read.add(index)
        x = torch.full((1, 4), float(index))
        if self.noise:
            x = x + torch.rand(()) + random.random() + float(numpy.random.rand())
        return {"x": x, "y": index, "name": f"n{index}"}


def epochs(loader: DataLoader, count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    return [(whole(batch["x"]), whole(batch["y"])) for _ in range(count) for batch in loader]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(4)
    numpy.random.seed(5)


def read_sharded(partition: str, length: int, batch: int, workers: int):
    mesh = mesh_of(partition)
    dataset = Counted(length)
    seed()
    with loading(mesh, shard=True):
        loader = DataLoader(dataset, batch, shuffle=True, num_workers=workers)
        batches = epochs(loader)
        assert len(loader) == -(-length // batch)
    return mesh.get_local_rank("sample"), batches, dataset.read


@pytest.mark.parametrize(
    ("partition", "length", "batch", "workers"),
    [
        ("sample=2", 12, 4, 0),
        ("sample=2", 13, 5, 0),  # uneven shards, a last batch of 3
        ("sample=4", 9, 4, 0),  # a last batch of 1: three ranks without a sample
        ("sample=2,height=2", 13, 5, 0),
        ("height=2,sample=2", 13, 5, 2),
        ("sample=3,width=1", 13, 5, 2),
    ],
)
def test_shards_are_the_batches_of_one_process(ranks, partition, length, batch, workers):
    seed()
    expected = epochs(DataLoader(Counted(length), batch, shuffle=True, num_workers=workers))
    read: dict[int, set[int]] = {}
    for coordinate, batches, indices in ranks(Partition.parse(partition).ranks).run(
        read_sharded, partition, length, batch, workers
    ):
        for (x, y), (expected_x, expected_y) in zip(batches, expected, strict=True):
            torch.testing.assert_close(x, expected_x, rtol=0, atol=0)
            torch.testing.assert_close(y, expected_y, rtol=0, atol=0)
        assert read.setdefault(coordinate, indices) == indices


def read_once(partition: str, length: int):
    dataset = Counted(length)
    with loading(mesh_of(partition), shard=True):
        list(DataLoader(dataset, 8))
    return dataset.read


def test_a_rank_reads_its_samples_only(ranks):
    read = ranks(4).run(read_once, "sample=4", 32)
    for rank, indices in enumerate(read):
        assert indices == {8 * batch + 2 * rank + i for batch in range(4) for i in range(2)}


def read_layout():
    mesh = mesh_of("sample=2,height=2")
    with loading(mesh, shard=True):
        (batch,) = DataLoader(Counted(5), 5)
    return batch["x"].shape, batch["x"].to_local().shape, str(batch["x"].placements), batch["name"]


def test_tensors_leave_as_dtensors_of_the_whole_batch(ranks):
    answers = ranks(4).run(read_layout)
    for shape, _, placements, _ in answers:
        assert shape == (5, 1, 4) and placements == "(Shard(dim=0), Replicate())"
    assert [local for _, local, _, _ in answers] == [(3, 1, 4), (3, 1, 4), (2, 1, 4), (2, 1, 4)]
    assert answers[3][3] == ["n3", "n4"]


def read_after_drawing_differently(shard: bool):
    """Ranks draw different amounts between batches, as dropout on uneven shards does."""
    mesh = mesh_of("sample=2,height=2")
    rank = torch.distributed.get_rank()
    seed()
    batches = []
    with loading(mesh, shard=shard):
        loader = DataLoader(Counted(8, noise=True), 4, shuffle=True)
        for _ in range(2):
            for batch in loader:
                batches.append(batch["x"].full_tensor() if shard else batch["x"])
                torch.rand(rank), [random.random() for _ in range(rank)], numpy.random.rand(rank)
    return torch.stack(batches), torch.rand(1)


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_ranks_stay_the_same_though_they_drew_differently(ranks, shard):
    answers = [batches for batches, _ in ranks(4).run(read_after_drawing_differently, shard)]
    for batches in answers[1:]:
        torch.testing.assert_close(batches, answers[0], rtol=0, atol=0)
    if not shard:
        seed()
        loader = DataLoader(Counted(8, noise=True), 4, shuffle=True)
        torch.testing.assert_close(
            answers[0], torch.stack([batch["x"] for _ in range(2) for batch in loader]), rtol=0, atol=0
        )


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


def total(samples: list) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples]).sum()


LOADERS = {
    "an iterable dataset": lambda: DataLoader(Endless(), 2),
    "no batches": lambda: DataLoader(TensorDataset(torch.zeros(4)), batch_size=None),
    "any order": lambda: DataLoader(TensorDataset(torch.zeros(4)), 2, num_workers=1, in_order=False),
    "a tensor without samples": lambda: DataLoader(TensorDataset(torch.zeros(4)), 2, collate_fn=total),
}


def refuse(kind: str) -> None:
    with loading(mesh_of("sample=2"), shard=True):
        next(iter(LOADERS[kind]()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("an iterable dataset", "needs a map-style Dataset"),
        ("no batches", "needs a map-style Dataset and a batch size"),
        ("any order", "needs in_order=True"),
        ("a tensor without samples", r"a tensor of shape \(\) from 1 samples"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ranks, kind, message):
    with pytest.raises(ValueError, match=message):
        ranks(2).run(refuse, kind)


def refuse_channels_alone() -> None:
    with loading(mesh_of("channel=2"), shard=True):
        pass


def test_a_partition_of_channels_alone_is_refused(ranks):
    with pytest.raises(ValueError, match="needs an axis sample"):
        ranks(2).run(refuse_channels_alone)


def leaves_no_trace() -> bool:
    before = DataLoader.__iter__, DataLoader._index_sampler
    with loading(mesh_of("sample=2"), shard=True):
        pass
    return before == (DataLoader.__iter__, DataLoader._index_sampler)


def test_loaders_are_plain_again_afterwards(ranks):
    assert all(ranks(2).run(leaves_no_trace))


@pytest.mark.parametrize(
    "workers, ranks, cores, enough", [(0, 4, 2, None), (1, 4, 2, None), (8, 4, 2, 1), (4, 2, 8, None), (5, 2, 8, 4)]
)
def test_more_workers_than_cores_are_reported(workers: int, ranks: int, cores: int, enough: int | None) -> None:
    told = too_many_workers(workers, ranks, cores)
    assert (
        (told is None) if enough is None else told is not None and told.endswith(f"num_workers={enough} may be faster")
    )
