"""Ranks that draw samples in different orders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from distconv.agreement.disagreement import Disagreement
from distconv.job.data import loading
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh

pytestmark = pytest.mark.gloo


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index))


def shuffle_apart() -> str:
    rank = torch.distributed.get_rank()
    with loading(make_mesh(Partition.parse("sample=2")), shard=True):
        order = list(range(8))[:: -1 if rank else 1]
        try:
            list(DataLoader(Numbers(), 4, sampler=order))
        except Disagreement as error:
            return str(error)
    return ""


def test_another_order_is_found(ranks):
    lines = ranks(2).run(shuffle_apart)
    assert set(lines) == {
        "the indices of a batch is not the same on every rank: rank 0 has [0, 1, 2, 3], rank 1 has [7, 6, 5, 4]"
    }
