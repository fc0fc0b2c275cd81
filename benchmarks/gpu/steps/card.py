"""The card: versions, how its clocks rise, and how fast its memory and the bus are."""

from __future__ import annotations

import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.fifteen import Run
from mucudnn.devices import device_of

MIB = 2**20

QUERY = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,pcie.link.gen.current,pcie.link.width.current"
)

PRODUCTS = 150
"""Matrix products after an idle second, some 0.2 s of them."""


def measure(run: Run) -> bool:
    figures, device = run.figures, run.device
    figures.add("Python", platform.python_version())
    figures.add("torch", torch.__version__)
    if device.type != "cuda":
        figures.add("card", "none: tried on a host")
        return True
    properties = torch.cuda.get_device_properties(device)
    figures.add("card", properties.name, about={"properties": str(properties)})
    figures.add("memory", properties.total_memory / 2**30, "GiB")
    figures.add("L2 cache", properties.L2_cache_size / MIB, "MiB")
    figures.add("CUDA", str(torch.version.cuda))
    figures.add("cuDNN", torch.backends.cudnn.version())
    figures.add("nvidia-smi, idle", _smi(), QUERY)
    began = time.perf_counter()
    torch.zeros(1, device=device).item()
    figures.add("start of CUDA", time.perf_counter() - began, "s")
    figures.add("memory of CUDA itself", device_of(device).outside() / MIB, "MiB")
    for name, work in {"clocks": _clocks, "bandwidth": _bandwidth, "pinned copies": _pinned}.items():
        run.attempt(name, work, run)
    return True


def _smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no answer: {error}"


def _milliseconds(work: Callable[[], object], count: int) -> list[float]:
    """Of each call, by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def _clocks(run: Run) -> None:
    size = 256 if run.small else 4096
    a, b = (torch.randn(size, size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.mm(a, b)
    torch.cuda.synchronize()
    time.sleep(1.0)
    times = _milliseconds(lambda: torch.mm(a, b, out=out), PRODUCTS)
    settled = statistics.median(times[-30:])
    late = [sum(times[: index + 1]) for index, took in enumerate(times) if took > 1.05 * settled]
    run.figures.add("bf16 matrix product, settled", 2e-9 * size**3 / settled, "TFLOP/s")
    run.figures.add("first product after an idle second over settled", times[0] / settled, "", times=times[:40])
    run.figures.add("clocks are up after", max(late, default=0.0), "ms")
    run.figures.add("nvidia-smi, busy", _smi(), QUERY)


def _bandwidth(run: Run) -> None:
    count = 16 * MIB if run.small else 4096 * MIB
    source = torch.empty(count, dtype=torch.int8, device=run.device)
    target = torch.empty_like(source)
    took = statistics.median(_milliseconds(lambda: target.copy_(source), 7)[1:])
    run.figures.add("memory, read and written", 2e-6 * count / took, "GB/s")


def _pinned(run: Run) -> None:
    count = 16 * MIB if run.small else 1024 * MIB
    began = time.perf_counter()
    host = torch.empty(count, dtype=torch.int8, pin_memory=True)
    run.figures.add("to pin a GiB", (time.perf_counter() - began) * 1024 * MIB / count, "s")
    there = torch.empty(count, dtype=torch.int8, device=run.device)
    to_host, to_device = (torch.cuda.Stream() for _ in range(2))
    for name, target, source in (("to the device", there, host), ("to the host", host, there)):
        took = statistics.median(_milliseconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), 5)[1:])
        run.figures.add(f"pinned copy {name}", 1e-6 * count / took, "GB/s")
    half = count // 2

    def both() -> None:
        for stream, target, source in (
            (to_device, there[:half], host[:half]),
            (to_host, host[half:], there[half:]),
        ):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in (to_host, to_device):
            torch.cuda.current_stream().wait_stream(stream)

    took = statistics.median(_milliseconds(both, 5)[1:])
    run.figures.add("pinned copies both ways at once, together", 1e-6 * count / took, "GB/s")
    blocks = []
    began = time.perf_counter()
    for _ in range(32):
        blocks.append(torch.empty(4 * MIB, dtype=torch.int8, pin_memory=True))
    run.figures.add("to pin a block of 4 MiB", 1e3 * (time.perf_counter() - began) / len(blocks), "ms")
