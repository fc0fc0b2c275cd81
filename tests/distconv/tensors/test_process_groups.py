"""Groups are made without a split of the default group, in which NCCL would wait for ranks that do not come.

Those of a job that a program has ended are not used in its next one, and end with it: their threads and connections.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forking
from torch import nn
from torch.distributed import distributed_c10d

import distconv
from distconv.tensors.process_groups import new_group
from distconv.transfer.group import joint_group


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


def jobs(rank: int, folder: Path) -> list[object]:
    """For each job of this process: whether its gradients are right, whether its group is the job's, how the model of
    the job before is refused, and the threads and open files of the process after it.
    """
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    plain, x = nn.Sequential(*layers).double(), torch.randn(2, 2, 9, 5, dtype=torch.float64)
    expected, found = copy.deepcopy(plain), []
    expected(x).square().sum().backward()
    former = None
    for job in range(3):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=2)
        mesh = distconv.init("height=2", device_type="cpu")
        model, refusal = distconv.parallelize(copy.deepcopy(plain), mesh), ""
        model(x).square().sum().backward()
        if former is not None:
            with pytest.raises(RuntimeError) as refused:
                former(x)
            refusal = str(refused.value)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        error = max(float((p.grad - q.grad).abs().max()) for p, q in pairs if p.grad is not None and q.grad is not None)
        its_own = joint_group(mesh, (0,)) is dist.group.WORLD
        former = model
        dist.destroy_process_group()
        left = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
        found.append((error < 1e-10, its_own, refusal.partition(";")[0], left))
    return found


def test_another_job_of_a_program_has_groups_of_its_own(tmp_path: Path) -> None:
    refusal = "a mesh whose process group the program has destroyed"
    with ProcessPoolExecutor(2, forking()) as processes:
        for first, *others in processes.map(jobs, range(2), [tmp_path] * 2):
            assert first[:-1] == (True, True, "")
            # Functions of torch that are imported during the first job have its group for their default.
            assert others == [(True, True, refusal, first[-1])] * 2
