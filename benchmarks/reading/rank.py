"""One rank of `reading.py`: rank 0 reads requests, a JSON object per line, and prints an answer to each.

python benchmarks/reading/rank.py RANK RANKS STORE
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distconv
from distconv import settings
from distconv.job.data import loading
from distconv.settings import StoreOption
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh
from mucudnn.networks.models import UNet3d

KEPT = StoreOption(4.0, False)


class Volumes(Dataset[Tensor]):
    """Volumes of an HDF5 file, which is opened once; `made` are the samples that this rank has made."""

    def __init__(self, path: str) -> None:
        self.volumes = h5py.File(path, "r")["volume"]
        self.made: list[int] = []

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> Tensor:
        self.made.append(index)
        return torch.from_numpy(self.volumes[index])


def io() -> dict[str, int]:
    """What the operating system has counted for this process: bytes asked of files, and bytes that came from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return {"asked": counted["rchar"], "disk": counted["read_bytes"]}


def drop_cache(path: str, *, own: bool) -> None:
    """Lets the operating system forget the pages of the ranks' file, or of this rank's own."""
    dist.barrier()
    if own or dist.get_rank() == 0:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def read(path: str, batch: int, partition: str, epochs: int, shard: bool, store: bool, plain: bool) -> Any:
    """Epochs of a loader on this rank: what each took of files, of other ranks and of time. "{rank}" in the path is the
    number of the rank, where each has a copy of its own."""
    torch.manual_seed(0)
    own = "{rank}" in path
    path = path.replace("{rank}", str(dist.get_rank()))
    dataset, rows = Volumes(path), []
    around: Any = contextlib.nullcontext()
    if not plain:
        around = loading(make_mesh(Partition.parse(partition)), shard=shard, store=KEPT if store else None)
    # Files that the ranks have by other names are told apart.
    with settings.options({"check": "off"} if own else {}), around as samples:
        loader = DataLoader(dataset, batch, shuffle=True)
        first: set[int] = set()
        for _ in range(epochs):
            drop_cache(path, own=own)
            dataset.made.clear()
            kept = samples.supply.store if store else None
            brought = kept.bytes_received if kept else 0
            before, wall, cpu = io(), time.perf_counter(), time.process_time()
            for _ in loader:
                pass
            wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, io()
            first = first or set(dataset.made)
            rows.append(
                {
                    "asked": after["asked"] - before["asked"],
                    "disk": after["disk"] - before["disk"],
                    "wall": wall,
                    "cpu": cpu,
                    "brought": (kept.bytes_received if kept else 0) - brought,
                    "missing": len(set(dataset.made) - first),
                }
            )
    return rows


def train(path: str, batch: int, partition: str, rounds: int) -> Any:
    """Seconds of steps of a U-Net, by turns an epoch from the store and as many steps on one batch in memory, and which
    of the two comes first by turns as well: of each step those of the clock, of the processor, and of the clock until
    it has its batch."""
    torch.manual_seed(0)
    mesh = make_mesh(Partition.parse(partition))
    model = distconv.parallelize(UNet3d(width=8), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    seconds: dict[str, list[list[list[float]]]] = {"store": [], "memory": []}

    def step(x: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def timed(kind: str, batches: Any) -> None:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        rows = []
        for x in batches:
            got = time.perf_counter()
            step(x)
            now, used = time.perf_counter(), time.process_time()
            rows.append([now - wall, used - cpu, got - wall])
            wall, cpu = now, used
        seconds[kind].append(rows)

    with loading(mesh, shard=True, store=KEPT) as samples:
        assert samples is not None and samples.supply is not None
        loader = DataLoader(Volumes(path), batch, shuffle=True)
        for x in loader:
            step(x)
        read_before = samples.supply.store.bytes_read
        arms = {"store": loader, "memory": [x] * len(loader)}
        for turn in range(rounds):
            for kind in sorted(arms, reverse=bool(turn % 2)):
                timed(kind, arms[kind])
        assert samples.supply.store.bytes_read == read_before
    return seconds


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    while True:
        line = sys.stdin.readline() if rank == 0 else ""
        told = [line]
        dist.broadcast_object_list(told, 0)
        if not told[0]:
            break
        request = json.loads(told[0])
        answer = {"read": read, "train": train}[request.pop("what")](**request)
        answers: list[Any] = [None] * ranks
        dist.all_gather_object(answers, answer)
        if rank == 0:
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
