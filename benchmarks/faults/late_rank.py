"""One rank of a group whose messages are late: trains a small network again and again, and compares the bits.

Started by `slow_ranks.py`: late_rank.py gloo RANK SIZE STORE ..., or mpiexec -n SIZE late_rank.py mpi ...; then
PARTITION DRAWS MILLISECONDS SEED. The first rank prints a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import distconv
from benchmarks.faults.late_messages import lateness

STEPS = 4


class Net(nn.Module):
    """A small U-Net with a head: convolutions, norms, a pool, a transposed convolution, a concatenation, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        x = self.last(torch.cat([x, self.up(self.deep(x))], 1))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def bits(mesh: DeviceMesh) -> str:
    """A digest of losses, and of what this rank holds of gradients and parameters, after some steps."""
    torch.manual_seed(3)
    model = distconv.parallelize(Net(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, targets = torch.randn(4, 4, 20, 18), torch.arange(4) % 3
    digest = hashlib.sha256()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        digest.update(loss.item().hex().encode())
    for parameter in model.parameters():
        for each in (parameter, parameter.grad):
            own = each.to_local() if isinstance(each, DTensor) else each
            digest.update(own.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    backend, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    if backend == "gloo":
        rank, size, store, *rest = rest
        dist.init_process_group("late", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    else:
        from distconv.mpi import init_process_group

        init_process_group(backend="late_mpi")
    partition, draws, milliseconds, seed = rest
    mesh = distconv.init(partition, device_type="cpu")
    expected = bits(mesh)
    begin = time.perf_counter()
    bits(mesh)
    plain = time.perf_counter() - begin
    unlike, seconds = 0, 0.0
    for draw in range(int(draws)):
        random = Random(f"{seed} {draw}")
        late = random.randrange(dist.get_world_size())
        most = float(milliseconds) / 1000 * random.random()
        if dist.get_rank() == late:
            lateness.draw(most, f"{seed} {draw}")
        begin = time.perf_counter()
        unlike += bits(mesh) != expected
        seconds += time.perf_counter() - begin
        lateness.seconds = 0.0
    told: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(told, (unlike, lateness.count))
    if dist.get_rank() == 0:
        figures = {
            "unlike": sum(each for each, _ in told),
            "late": sum(count for _, count in told),
            "plain seconds": plain,
            "late seconds": seconds / int(draws),
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
