"""Two ranks that share the GPU over Gloo, against one process; and NCCL with one rank."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.fifteen import Run

ROOT = Path(__file__).resolve().parents[3]

STEPS = 5


def train(device: torch.device, size: int) -> None:
    """A script as users have it: prints the loss of each step, and the milliseconds of the last ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(16, 1, 1),
    )
    model = model.double().to(device)
    x = torch.randn(4, 3, size, size, dtype=torch.float64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.15g} ms {1e3 * (time.perf_counter() - began):.3f}", flush=True)


def measure(run: Run) -> bool:
    run.attempt("losses of two ranks against one process", _gloo, run)
    if run.device.type == "cuda" and dist.is_nccl_available():
        run.attempt("NCCL allreduce with one rank", _nccl, run)
    return True


def _gloo(run: Run) -> None:
    size = 32 if run.small else 512
    script = [str(Path(__file__)), str(run.device), str(size)]
    arms = {
        "one process": [sys.executable, *script],
        "two ranks": [sys.executable, "-m", "distconv", "run", "--nproc", "2", "--partition", "height=2", *script],
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for name, command in arms.items():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found[name] = [(float(a), float(b)) for a, b in re.findall(r"^loss (\S+) ms (\S+)$", done.stdout, re.MULTILINE)]
        if len(found[name]) != STEPS:
            print(done.stderr[-4000:])
            said = done.stderr.strip().splitlines() or ["no output"]
            raise RuntimeError(f"{name}: {said[-1]}")
        run.figures.add(f"{name}: last step", found[name][-1][1], "ms")
    off = max(abs(a - b) / abs(a) for (a, _), (b, _) in zip(*found.values(), strict=True))
    run.figures.add("losses of two ranks against one process", off, "relative")


def _nccl(run: Run) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1024, device=run.device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    run.figures.add("NCCL allreduce with one rank", 1e4 * (time.perf_counter() - began), "us")
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    run.figures.add("NCCL all_to_all_single", "equal" if torch.equal(received, tensor) else "NOT equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(torch.device(sys.argv[1]), int(sys.argv[2]))
