"""What mucudnn takes of the host's time, in CUDA graphs, and in a compiled model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import mucudnn
from benchmarks.gpu import costs
from benchmarks.gpu.fifteen import Run
from benchmarks.networks import NETWORKS

LIMIT = "64MiB"
STEPS = 20


def measure(run: Run) -> bool:
    figures, device = run.figures, run.device
    row = costs.measure(device)
    figures.add("torch's call of a small convolution", row["stock"], "us")
    figures.add("detour of a call that is left to torch", row["shim"] - row["stock"], "us")
    figures.add("a part of a planned call", row["part"], "us", algorithm=row["algorithm"])
    torch.manual_seed(0)
    with torch.no_grad(), mucudnn.patched(workspace_limit=LIMIT, progress="off", database=":memory:", planning="ahead"):
        if device.type == "cuda":
            network = NETWORKS["resnet18"].small() if run.small else NETWORKS["resnet18"]
            model = network.build().float().to(device).eval()
            x = network.sample(16)[0].float().to(device)
            run.attempt("a CUDA graph of ResNet-18 against eager", _captured, run, model, x)
        small = nn.Sequential(
            nn.Conv2d(3, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
        )
        x = torch.randn(4, 3, 32, 32, device=device)
        run.attempt("a small compiled model against eager", _compiled, run, small.to(device).eval(), x)
    return True


def _compiled(run: Run, model: nn.Module, x: torch.Tensor) -> None:
    eager, compiled = model(x), torch.compile(model)
    began = time.perf_counter()
    found = compiled(x)
    run.figures.add("a small compiled model's first call", time.perf_counter() - began, "s")
    off = ((found - eager).double().norm() / eager.double().norm()).item()
    run.figures.add("a small compiled model against eager", off, "relative")
    run.figures.add("eager forward", 1e3 * _seconds(lambda: model(x), run.device), "ms")
    run.figures.add("compiled forward", 1e3 * _seconds(lambda: compiled(x), run.device), "ms")


def _captured(run: Run, model: nn.Module, x: torch.Tensor) -> None:
    eager = model(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(x)
    graph.replay()
    torch.cuda.synchronize()
    run.figures.add(
        "a CUDA graph of ResNet-18 against eager", "bit-equal" if torch.equal(result, eager) else "NOT equal"
    )
    run.figures.add("ResNet-18 forward, eager", 1e3 * _seconds(lambda: model(x), run.device), "ms")
    run.figures.add("ResNet-18 forward, a replay", 1e3 * _seconds(graph.replay, run.device), "ms")


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / STEPS
