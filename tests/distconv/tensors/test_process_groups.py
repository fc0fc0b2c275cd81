"""Groups are made without a split of the default group, in which NCCL would wait for ranks that do not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distconv.tensors.process_groups import new_group


@pytest.fixture
def bound() -> Iterator[torch.device]:
    """The device that the default group of this process is bound to."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("by_members", [False, True])
def test_a_bound_group_is_not_split(by_members: bool, bound: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[object] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", split.append)
    made = new_group([0], by_members=by_members, backend="gloo")
    assert dist.get_world_size(made) == 1
    assert not split
    assert dist.group.WORLD.bound_device_id == bound
