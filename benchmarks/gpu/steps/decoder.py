"""A decoder shaped like Stable Diffusion's, in float16: whole, in parts in turn, and within a quarter and a tenth.

The memory is that of torch's allocator beyond weights and the latent; a quarter and a tenth are of what the whole call
takes.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch
from torch import nn

import distconv
from benchmarks.gpu.fifteen import Run
from examples.vae_decode import decoder

MIB = 2**20

SIZES = (1024, 2048, 4096)
BEYOND = 8192
"""A picture that the whole decoder is not expected to fit the card with."""

PARTS = "height=8"
SHARES = {"within a quarter": 0.25, "within a tenth": 0.1}
CALLS = 3


def measure(run: Run) -> bool:
    torch.manual_seed(0)
    dtype, width = (torch.float32, 8) if run.device.type != "cuda" else (torch.float16, 8 if run.small else 128)
    model = decoder(width).to(run.device, dtype).eval()
    for size in (64, 128) if run.small else SIZES:
        if run.figures.has(f"{size}, within a tenth"):
            continue
        if run.left <= 0:
            return False
        latent = torch.randn(1, 4, size // 8, size // 8, device=run.device).to(dtype)
        whole, picture = _decoded(run, f"{size}, whole", model, latent, None)
        _decoded(run, f"{size}, in turn", model, latent, picture, memory=None)
        for name, share in SHARES.items():
            if whole is None or run.left <= 0:
                return False
            _decoded(run, f"{size}, {name}", model, latent, picture, memory=max(int(share * whole), MIB))
    beyond = 256 if run.small else BEYOND
    if not run.figures.has(f"{beyond}, in turn"):
        if run.left <= 0:
            return False
        latent = torch.randn(1, 4, beyond // 8, beyond // 8, device=run.device).to(dtype)
        _decoded(run, f"{beyond}, whole", model, latent, None)
        _decoded(run, f"{beyond}, in turn", model, latent, None, memory=8 * 2**30)
    return True


def _decoded(
    run: Run, name: str, model: nn.Module, latent: torch.Tensor, whole: torch.Tensor | None, **limit: Any
) -> tuple[int | None, torch.Tensor | None]:
    """The bytes that a call takes, and the picture; both None where it does not fit."""
    on_card = run.device.type == "cuda"
    gc.collect()
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.memory_allocated() if on_card else 0
    decode: nn.Module = nn.Sequential(*model) if limit else model  # parts belong to the wrapper, not to the model
    if limit:
        distconv.in_turn(decode, PARTS, memory=limit["memory"])
    times, picture = [], None
    try:
        for _ in range(CALLS):
            picture = None
            began = time.perf_counter()
            with torch.inference_mode():
                picture = decode(latent)
            if on_card:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
    except torch.OutOfMemoryError as error:
        run.figures.add(name, f"does not fit: {str(error).splitlines()[0][:120]}")
        return None, None
    assert picture is not None
    taken = torch.cuda.max_memory_allocated() - before if on_card else 4 * picture.nbytes
    error = None if whole is None else ((picture.float() - whole.float()).norm() / whole.float().norm()).item()
    run.figures.add(f"{name}: call 1", times[0], "ms")
    run.figures.add(f"{name}: later calls", statistics.median(times[1:]), "ms")
    if on_card:
        run.figures.add(f"{name}: peak", taken / MIB, "MiB")
        run.figures.add(f"{name}: reserved", torch.cuda.max_memory_reserved() / MIB, "MiB")
        run.figures.add(f"{name}: pinned", torch.cuda.host_memory_stats()["active_bytes.peak"] / MIB, "MiB")
    run.figures.add(name, error, "relative error", milliseconds=times)
    return taken, picture
