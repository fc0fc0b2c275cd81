"""Volumes: one convolution whose workspace is larger than many a card, and training steps of a 3-D U-Net."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

import mucudnn
from benchmarks.gpu.fifteen import Run
from benchmarks.networks import NETWORKS

MIB = 2**20

LARGE = (1, 64, 361, 370, 251)
"""The input of pytorch#95024, in half; 32 filters of 3x3x3."""

ARMS = {"torch": None, "mucudnn within 1 GiB": "1GiB", "mucudnn within 64 MiB": "64MiB"}


def measure(run: Run) -> bool:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    if not run.figures.has("one convolution"):
        _convolution(run)
    for size in (16,) if run.small else (128, 192):
        name = f"3-D U-Net, {size}"
        if run.figures.has(name):
            continue
        if run.left <= 0:
            return False
        _training(run, name, size)
    return True


def _convolution(run: Run) -> None:
    dtype = torch.float16 if run.device.type == "cuda" else torch.float32
    shape = (1, 8, 12, 12, 12) if run.small else LARGE
    x = torch.randn(shape, device=run.device, dtype=dtype)
    layer = nn.Conv3d(shape[1], 32, 3, padding=1).to(run.device, dtype)
    results: dict[str, torch.Tensor] = {}

    def call() -> torch.Tensor:
        with torch.no_grad():
            return layer(x)

    for arm in ("torch", "mucudnn within 1 GiB"):
        with _patched(ARMS[arm]):
            found = _measured(run, f"one convolution, {arm}", call)
            if found is not None:
                results[arm] = found
    if len(results) == 2:
        exact, other = (found.double() for found in results.values())
        run.figures.add("one convolution", ((other - exact).norm() / exact.norm()).item(), "relative, mucudnn to torch")
    else:
        run.figures.add("one convolution", "not both arms ran")


def _training(run: Run, name: str, size: int) -> None:
    network = NETWORKS["unet3d"].small() if run.small else NETWORKS["unet3d"]
    torch.manual_seed(0)
    model = network.build().float().to(run.device)
    x = torch.randn(1, network.input_shape[0], *(size,) * 3, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for arm, limit in ARMS.items():
        with _patched(limit):
            _measured(run, f"{name}, {arm}", step)
    run.figures.add(name, "measured")


def _patched(limit: str | None) -> object:
    if limit is None:
        return nullcontext()
    return mucudnn.patched(workspace_limit=limit, progress="off", database=":memory:", planning="ahead")


def _measured(run: Run, name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Adds the first call's and later calls' times and the peak; the result, None where it does not fit."""
    on_card = run.device.type == "cuda"
    times = []
    try:
        if on_card:
            torch.cuda.empty_cache()
        result = None
        for count in range(4):
            result = None
            if on_card and count:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_card else 0
            began = time.perf_counter()
            result = work()
            if on_card:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
    except torch.OutOfMemoryError as error:
        run.figures.add(name, f"does not fit: {str(error).splitlines()[0][:120]}")
        return None
    run.figures.add(f"{name}: first call", times[0], "ms")
    if on_card:
        run.figures.add(f"{name}: peak", (torch.cuda.max_memory_allocated() - before) / MIB, "MiB")
    run.figures.add(name, statistics.median(times[1:]), "ms")
    return result
