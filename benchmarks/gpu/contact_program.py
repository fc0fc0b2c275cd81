"""Questions of the first contact about programs: sums, threads, caps, costs, CUDA graphs, communication."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.contact import Answer, Question, alexnet_conv2, algorithms, needs_gpu, precise
from benchmarks.gpu.costs import measure
from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import tiles
from mucudnn.optimizer import Division, Option
from mucudnn.providers import Provider
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule

ERROR = 1e-5
"""Of a float32 sum, relative in the 2-norm: what Winograd and Fourier kernels lose."""

ALONE = Path(__file__).with_name("contact_alone.py")
"""Measures in a process of its own, as both variables are read once only."""

CAPS = (None, "0", "8", "64")
"""Values of CUDNN_CONV_WSCAP_DBG, in MiB."""


def sums(device: torch.device) -> Answer:
    problem = alexnet_conv2(device, Direction.BACKWARD_FILTER)
    torch.manual_seed(0)
    given = synthetic_operands(problem, device)
    exact = _weight_gradient(problem, given)
    held = torch.randn_like(exact) * exact.std()
    held = held.float().double()
    errors: dict[str, float] = {}
    failed = []
    with precise("float32"):
        for name, provider in algorithms(device, problem).items():
            given.w.copy_(held)
            parts = [tile.part(given) for tile in tiles(problem, Dim.BATCH, (problem.extent // 2,) * 2)]
            if not all(provider.serves(part.problem, name) for part in parts):
                continue
            try:
                provider.launch(name, parts, accumulate=True)
            except RuntimeError as error:
                failed.append(f"{name} failed: {_line(error)}")
                continue
            wanted = held + exact
            errors[name] = ((given.w.double() - wanted).norm() / wanted.norm()).item()
    wrong = {name: error for name, error in errors.items() if not error < ERROR}
    worst = max(errors.values(), default=float("nan"))
    told = [f"{len(errors)} algorithms, largest relative error {worst:.1e}", *failed]
    told += [f"{name} is off by {error:.1e}" for name, error in wrong.items()]
    return Answer("no" if wrong or not errors else "yes", "; ".join(told))


def threads(device: torch.device) -> Answer:
    """A plan made in this thread, run by another one with the handle of its own."""
    problem = alexnet_conv2(device, Direction.FORWARD)
    given = synthetic_operands(problem, device)
    wrong, count = [], 0
    with precise("float32"):
        for name, provider in list(algorithms(device, problem).items())[:8]:
            schedule = _schedule(problem, provider, name, 1)
            results = []
            for run_in_thread in (False, True):
                target = torch.empty_like(given.y)
                operands = Operands(given.x, given.w, target)
                if run_in_thread:
                    thread = threading.Thread(target=_run, args=(schedule, operands, device))
                    thread.start()
                    thread.join()
                else:
                    _run(schedule, operands, device)
                results.append(target)
            count += 1
            if not torch.allclose(*results, rtol=1e-4, atol=1e-4):
                wrong.append(name)
    return Answer("no" if wrong else "yes", f"{count} algorithms" + (f", wrong: {', '.join(wrong)}" if wrong else ""))


def caps(device: torch.device) -> Answer:
    needs_gpu(device)
    told, sizes = [], {}
    for cap in CAPS:
        environment = {name: value for name, value in os.environ.items() if name != "CUDNN_CONV_WSCAP_DBG"}
        if cap is not None:
            environment["CUDNN_CONV_WSCAP_DBG"] = cap
        command = [sys.executable, str(ALONE), "workspace", str(device)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        name = "no cap" if cap is None else f"{cap} MiB"
        if done.returncode:
            told.append(f"{name}: {(done.stderr.splitlines() or ['it failed'])[-1]}")
            continue
        sizes[cap] = float(done.stdout.split()[-1])
        told.append(f"{name}: {sizes[cap]:.1f} MiB")
    capped = {int(cap): size for cap, size in sizes.items() if cap is not None}
    holds = all(size <= cap + 1 for cap, size in capped.items())
    said = "it does not cap"
    if holds and capped:
        bites = sizes.get(None, 0.0) > max(capped.values())
        said = "it caps" if bites else "nothing needed more than the caps"
    if 0 in capped:
        said += f"; 0 means {'none' if capped[0] <= 1 else 'something else'}"
    return Answer(said, "; ".join(told))


def host(device: torch.device) -> Answer:
    row = measure(device)
    detour = row["shim"] - row["stock"]
    figure = f"torch's call takes {row['stock']:.1f} µs; the part is by {row['algorithm']}"
    return Answer(f"{detour:.1f} µs and {row['part']:.1f} µs", figure)


def cuda_graph(device: torch.device) -> Answer:
    needs_gpu(device)
    problem = alexnet_conv2(device, Direction.FORWARD)
    given = synthetic_operands(problem, device)
    told, captured = [], 0
    found = algorithms(device, problem)
    engine = next((name for name in found if name.startswith("eng")), None)
    older = next((name for name in found if name.startswith("legacy_")), None)
    for name in filter(None, (engine, older)):
        schedule = _schedule(problem, found[name], name, 2)
        for _ in range(3):
            _run(schedule, given, device)
        expected = given.y.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                schedule.run(given)
        except RuntimeError as error:
            told.append(f"{name}: {_line(error)}")
            torch.cuda.synchronize(device)
            continue
        given.y.zero_()
        graph.replay()
        torch.cuda.synchronize(device)
        same = torch.equal(given.y, expected)
        captured += same
        began = time.perf_counter()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize(device)
        took = (time.perf_counter() - began) / 20
        told.append(f"{name} in two parts: {'equal' if same else 'NOT equal'}, {1e6 * took:.0f} µs a replay")
    return Answer("yes" if told and captured == len(told) else "no", "; ".join(told))


def launch_order(device: torch.device) -> Answer:
    """Two communicators of one rank, used in turn on two streams: all that one card allows."""
    needs_gpu(device)
    if not dist.is_nccl_available():
        return Answer("no NCCL", "this torch is built without it")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    told = []
    for value in ("0", "1"):
        environment = {**os.environ, "NCCL_LAUNCH_ORDER_IMPLICIT": value}
        command = [sys.executable, str(ALONE), "nccl", str(device)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        last = (done.stderr.splitlines() or ["it failed"])[-1]
        told.append(f"{value}: {done.stdout.split()[-1]} µs" if not done.returncode else f"{value}: {last}")
    said = "yes, and without" if all("µs" in one for one in told) else "no"
    return Answer(said, f"NCCL {version}; {'; '.join(told)}")


def _weight_gradient(problem: ConvProblem, given: Operands) -> torch.Tensor:
    """In float64 by stock torch."""
    x, y = given.x.double(), given.y.double()
    return torch.nn.grad.conv2d_weight(x, problem.w_shape, y, problem.stride, problem.padding, problem.dilation)


def _schedule(problem: ConvProblem, provider: Provider, name: str, parts: int) -> Schedule:
    division = Division((Option(problem.extent // parts, name, 0.0, 0),) * parts)
    return Schedule(problem, division, {name: provider})


def _run(schedule: Schedule, operands: Operands, device: torch.device) -> None:
    schedule.run(operands)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


QUESTIONS = {
    "sums": Question("Is beta = 1 of weight gradients exact?", sums),
    "threads": Question("Does a plan of one thread run in another, with the handle of that one?", threads),
    "caps": Question("Does CUDNN_CONV_WSCAP_DBG cap torch's workspace, and does 0 mean none?", caps),
    "host": Question("What do a call left to torch and a part of a planned one cost on the host?", host),
    "graph": Question("Is a planned call captured in a CUDA graph?", cuda_graph),
    "nccl": Question("Do two communicators of NCCL run with NCCL_LAUNCH_ORDER_IMPLICIT?", launch_order),
}
