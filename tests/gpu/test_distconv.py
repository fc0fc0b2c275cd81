"""distconv on 2 and 4 ranks that share one GPU, over Gloo and over MPI, whose messages pass through pinned memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, missing_for_mpi
from reference import errors
from torch import nn

import distconv
import mucudnn

PARTITIONS = {2: ("height=2", "sample=2", "width=2"), 4: ("height=2,width=2", "sample=2,height=2", "height=4")}


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def ranks(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Callable[[int], Ranks]]:
    """ranks(size).run(function, *args) runs a function on `size` processes."""
    if request.param == "mpi" and (reason := missing_for_mpi()):
        pytest.skip(reason)
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools:
            pools[size] = Ranks(size, request.param)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


def block() -> nn.Module:
    """What the rules do on a device: strides, dilation, groups, statistics over all samples, pooling, resizing."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 2, 1),
    )


def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d(2), nn.ConvTranspose3d(4, 2, 2, stride=2)
    )


@pytest.mark.parametrize("size, partition", [(size, text) for size, texts in PARTITIONS.items() for text in texts])
def test_a_network_equals_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, device: torch.device
) -> None:
    for found in ranks(size).run(errors, block, [(4, 3, 33, 34)], partition, device_type=device.type):
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("partition", ["depth=2", "depth=2,height=2"])
def test_a_volume_equals_one_process(ranks: Callable[[int], Ranks], partition: str, device: torch.device) -> None:
    size = 2 ** (partition.count(",") + 1)
    for found in ranks(size).run(errors, volume, [(2, 2, 9, 10, 8)], partition, device_type=device.type):
        assert max(found.values()) < 1e-9, found


def through_mucudnn(partition: str, device_type: str) -> tuple[dict[str, float], int]:
    """As `errors`, the local convolutions patched; and how many were met."""
    with mucudnn.patched(workspace_limit="8MiB", database=":memory:", progress="off"):
        found = errors(block, [(4, 3, 33, 34)], partition, device_type=device_type)
        return found, len(mucudnn.report())


def test_local_convolutions_pass_through_mucudnn(ranks: Callable[[int], Ranks], device: torch.device) -> None:
    for found, met in ranks(2).run(through_mucudnn, "height=2", device.type):
        assert max(found.values()) < 1e-9, found
        assert met > 0


def steps(partition: str | None, device_type: str, count: int) -> list[float]:
    """Losses of training steps, in float64; without a partition, in this process alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    model = model.double().to(device_type)
    x, target = (torch.randn(4, channels, 16, 15).double().to(device_type) for channels in (3, 1))
    if partition is not None:
        mesh = distconv.init(partition, device_type=device_type)
        model = distconv.parallelize(model, mesh)
        x, target = distconv.shard(x, mesh), distconv.shard(target, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_prints_the_losses_of_one_process(ranks: Callable[[int], Ranks], device: torch.device) -> None:
    expected = steps(None, device.type, 4)
    for losses in ranks(4).run(steps, "sample=2,height=2", device.type, 4):
        assert losses == pytest.approx(expected, rel=1e-9)


def collectives(device_type: str) -> None:
    """Every collective that distconv uses, on tensors of the device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((size,), float(rank), device=device_type)
    total = mine.clone()
    dist.all_reduce(total)
    assert total.device.type == device_type and total.tolist() == [size * (size - 1) / 2] * size
    gathered = torch.empty(size * size, device=device_type)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.view(size, size)[:, 0].tolist() == list(range(size))
    dealt = torch.empty(size, device=device_type)
    dist.all_to_all_single(dealt, torch.arange(size, dtype=torch.float32, device=device_type) + 10 * rank)
    assert dealt.tolist() == [10.0 * other + rank for other in range(size)]
    root = mine.clone()
    dist.broadcast(root, 0)
    assert root.tolist() == [0.0] * size


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_on_tensors_of_the_device(ranks: Callable[[int], Ranks], size: int, device: torch.device) -> None:
    ranks(size).run(collectives, device.type)


PROGRAM = """
import distconv, torch
mesh = distconv.init("height=2")
model = distconv.parallelize(torch.nn.Conv2d(2, 2, 3, padding=1).cuda(), mesh)
y = model(torch.ones(1, 2, 8, 8, device="cuda"))
print(torch.distributed.get_backend(), tuple(y.shape))
"""


def test_a_program_of_torchrun_shares_a_gpu(device: torch.device, tmp_path: Path) -> None:
    """NCCL would refuse it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == 2 * ["gloo (1, 2, 8, 8)"], done.stderr
