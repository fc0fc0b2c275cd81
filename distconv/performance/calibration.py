"""Calibration: all ranks of a job measure the speed of this machine at the same time, as they share it in a job."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distconv import settings
from distconv.model.homes import BUCKET_BYTES
from distconv.model.parallelize import parallelize, shard
from distconv.performance.doubt import doubt, standard_error
from distconv.performance.events import Kernel, RecordedStep, Start
from distconv.performance.kept import Kept
from distconv.performance.kernels import Measured
from distconv.performance.machine import DeviceSpeeds, HostSpeeds, Machine, Node, NodeNetwork, machine_toml
from distconv.performance.recording import on_meta, record_step
from distconv.performance.replay import replay
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh
from distconv.transfer.collectives import gather_into, scatter_sum_into

RUNS = 7
SIZES = (2**8, 2**12, 2**16, 2**20, 2**22)
"""Bytes of the messages that are timed."""

SQUARE = 1024
COPIED = 2**26

COMPUTES = 0.5
"""Seconds for which all ranks compute, to see how much of the processors they get."""

SMALL_SQUARE, MANY = 256, 20
"""The size of products that ranks compute while a message is under way, and how many of them are timed together."""

LEAST_SUMS, MOST_LOST = 0.1, 0.95
"""Bounds of what is measured, so that noise makes no message take no time, and no kernel all of it."""

STEPS = ((1, 32, 112), (2, 64, 56), (4, 128, 28))
"""Sizes (samples of a rank, channels, rows, columns) of networks that show how much longer kernels take in steps."""

MOST_COLD = 3.0
"""A bound of it, so that what else ran just then does not count as the machine's."""

CONVOLUTIONS = (
    ((4, 64, 56, 56), (64, 64, 3, 3)),
    ((4, 128, 28, 28), (128, 128, 3, 3)),
    ((2, 16, 32, 32, 32), (32, 16, 3, 3, 3)),
)
"""Inputs and weights that represent a network's convolutions."""


_errors: list[float] = []
"""The standard errors of what this rank has measured, as shares of it."""

_shares: list[float] = []
"""The processor time that this rank had while it computed, as shares of what it would have had without other load."""


def calibrate() -> Machine:
    """This machine, by what its ranks measure. Every rank of the job must call it; the first one's is to be used."""
    _errors.clear()
    _shares.clear()
    ranks = dist.get_world_size()
    nodes: list[str] = [""] * ranks
    dist.all_gather_object(nodes, platform.node())
    local_ranks = nodes.count(nodes[0])
    flops = _product_rate(local_ranks)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_ranks)
    bandwidth = _rate(2 * COPIED, _copy())
    device = DeviceSpeeds(
        flops=flops,
        efficiency=min(1.0, statistics.median(_convolution(*each) for each in CONVOLUTIONS) / flops),
        bandwidth=bandwidth,
        kernel=_smallest(),
        memory=memory,
    )
    near = dist.new_group(list(range(local_ranks)))  # on the other nodes as on this one
    node = _links(near, bandwidth) if dist.get_rank() < local_ranks else (0.0, bandwidth)
    network = node if ranks == local_ranks else _links(dist.group.WORLD, bandwidth)
    near_sums = _reductions(near, *node) if dist.get_rank() < local_ranks else {}
    carries, slows = _beside_kernels()
    machine = Machine(
        name=f"{platform.node()}, {ranks} ranks",
        device=device,
        host=HostSpeeds(operator=0.0, asynchronous=False, carries=carries, slows=slows),
        node=Node(local_ranks, *node, **near_sums),
        network=NodeNetwork(*network, **(near_sums if ranks == local_ranks else _reductions(None, *network))),
        measured=Measured(torch.get_num_threads(), Kept(), local_ranks, beside=False),
    )
    for name, measure in (("operator", _operator), ("message", _message), ("cold", _cold)):
        found: Any = {name: measure(machine)}
        machine = replace(machine, host=replace(machine.host, **found))
    _product_rate(local_ranks)  # again, as others may have started or ended
    return replace(machine, doubt=doubt(_errors, _shares))


def _product_rate(local_ranks: int) -> float:
    """Multiplications and additions per second. Notes the share of the processors that this rank gets meanwhile."""
    threads, busy, start = torch.get_num_threads(), time.process_time(), time.perf_counter()
    product = _product()
    while time.perf_counter() - start < COMPUTES:
        product()
    share = (time.process_time() - busy) / (threads * (time.perf_counter() - start))
    _shares.append(share * max(1.0, local_ranks * threads / (os.cpu_count() or 1)))
    return _rate(2 * SQUARE**3, product)


def _rate(amount: float, call: Callable[[], object]) -> float:
    return amount / _median(call)


def _median(call: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Seconds of a call that all ranks of a group begin together."""
    call()
    times = []
    for _ in range(RUNS):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    _errors.append(standard_error(times))
    return statistics.median(times)


def _product(square: int = SQUARE) -> Callable[[], object]:
    a, b = torch.randn(square, square), torch.randn(square, square)
    return lambda: a @ b


def _copy() -> Callable[[], object]:
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _convolution(input_shape: Sequence[int], weight_shape: Sequence[int]) -> float:
    x, weight = torch.randn(*input_shape), torch.randn(*weight_shape)
    convolution = F.conv2d if x.ndim == 4 else F.conv3d
    y = convolution(x, weight, padding=1)
    return _rate(2 * y.numel() * weight[0].numel(), lambda: convolution(x, weight, padding=1))


def _smallest() -> float:
    x = torch.ones(8)
    return _median(lambda: [x.neg() for _ in range(1000)]) / 1000


def _links(group: dist.ProcessGroup | None, otherwise: float) -> tuple[float, float]:
    """Latency and bandwidth of messages from each rank to all others; of one rank, no time and that of its memory."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return 0.0, otherwise
    seconds = []
    for size in SIZES:
        sent = torch.zeros(ranks * size, dtype=torch.uint8)
        received = torch.empty_like(sent)
        seconds.append(_median(lambda x=sent, y=received: dist.all_to_all_single(y, x, group=group), group))  # type: ignore[misc]
    return _line([(ranks - 1) * size for size in SIZES], seconds, ranks - 1)


def _line(sizes: Sequence[int], seconds: Sequence[float], messages: int) -> tuple[float, float]:
    """Latency of one message, and bandwidth, from the times of some: least squares of the relative error."""
    terms = np.array([[messages, size] for size in sizes], dtype=float) / np.array(seconds)[:, None]
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    fastest = max(size / took for size, took in zip(sizes, seconds, strict=True))
    return max(0.0, float(latency)), float(1 / per_byte) if per_byte > 0 else fastest


def _reductions(group: dist.ProcessGroup | None, latency: float, bandwidth: float) -> dict[str, Any]:
    """How many times as long the bytes of sums, whole and scattered, and of gathers take as those of all-to-alls."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return {}
    gradients = torch.zeros(BUCKET_BYTES // 4 // ranks * ranks)
    part = gradients.new_empty(len(gradients) // ranks)
    calls: dict[str, Callable[[], object]] = {
        "sums": lambda: dist.all_reduce(gradients, group=group),
        "scatters": lambda: scatter_sum_into(part, gradients, group).wait(),
        "gathers": lambda: gather_into(gradients, part, group).wait(),
    }
    found = {}
    for steps, (name, call) in zip((2, 1, 1), calls.items(), strict=True):
        took = _median(call, group) - steps * (ranks - 1) * latency
        found[name] = max(LEAST_SUMS, took / (steps * (ranks - 1) / ranks * gradients.nbytes / bandwidth))
    return found


def _beside_kernels() -> tuple[float, float]:
    """A sum while all ranks compute: the share of its time that they lose, and how many times as long it takes."""
    if dist.get_world_size() == 1:
        return 0.0, 1.0
    gradients, kernel = torch.zeros(BUCKET_BYTES // 4), _product(SMALL_SQUARE)
    alone = _median(lambda: dist.all_reduce(gradients))
    one = _median(lambda: [kernel() for _ in range(MANY)]) / MANY
    lost, times = [], []
    for _ in range(RUNS):
        dist.barrier()
        start, count = time.perf_counter(), 0
        work = dist.all_reduce(gradients, async_op=True)
        while not work.is_completed():
            kernel()
            count += 1
        took = time.perf_counter() - start
        work.wait()
        lost.append(1 - count * one / took)
        times.append(took / alone)
    slows = max(1.0, statistics.median(times))
    # The processor time of a sum is no more than the time that it takes while no rank computes.
    return min(MOST_LOST, 1 / slows, max(0.0, statistics.median(lost))), slows


def _operator(machine: Machine) -> float:
    """Seconds of the host for each operator, from a step of a network too small for its kernels to take any."""
    took, recorded = _step(lambda: _network(8, 24, norms=False), 1, 16, machine)
    return max(0.0, took - _predicted(recorded, machine)) / recorded.launches


def _message(machine: Machine) -> float:
    """Seconds of the host for each message beyond that, the mean of sums in norms and of halos in such networks."""
    found = []
    for axis, norms in (("sample", True), ("height", False)):
        took, recorded = _step(partial(_network, 8, 11, norms), 1, 16, machine, axis)
        messages = sum(isinstance(event, Start) for event in recorded.events)
        found.append(max(0.0, took - _predicted(recorded, machine)) / messages if messages else 0.0)
    return statistics.mean(found)


def _cold(machine: Machine) -> float:
    """How much longer kernels take within a step than alone, as a share of the time in which their operands pass
    through memory, the median of some networks."""
    found = []
    for samples, channels, size in STEPS:
        took, recorded = _step(partial(_network, channels, 6), samples, size, machine)
        passed = sum(event.bytes for event in recorded.events if isinstance(event, Kernel))
        found.append((took - _predicted(recorded, machine)) / (passed / machine.device.bandwidth))
    return min(MOST_COLD, max(0.0, statistics.median(found)))


def _predicted(recorded: RecordedStep, machine: Machine) -> float:
    return replay(recorded, machine).total


def _step(
    build: Callable[[], nn.Module], samples: int, size: int, machine: Machine, axis: str = "sample"
) -> tuple[float, RecordedStep]:
    """Seconds of a training step of a network, each rank with so many samples or rows, and what is recorded of it."""
    ranks = dist.get_world_size()
    mesh = make_mesh(Partition(((axis, ranks),)), device_type="cpu")
    shape = (samples * ranks, 3, size, size) if axis == "sample" else (samples, 3, size * ranks, size)
    with settings.options({"check": "off"}):  # tensors without data have nothing to compare
        recorded = record_step(on_meta(build), mesh, shape)
    for event in recorded.events:
        if isinstance(event, Kernel):
            machine.kernel_seconds(event)  # every rank measures it now, beside the others
    torch.manual_seed(0)  # kernels have been measured on numbers, not on as many on every rank
    model, x = parallelize(build(), mesh), shard(torch.randn(shape), mesh)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(3):
        step()
    return _median(step), recorded


def _network(channels: int, depth: int, norms: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (3, *[channels] * depth):
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.ReLU()]
        layers[-1:-1] = [nn.BatchNorm2d(channels)] * norms
    return nn.Sequential(*layers)


if __name__ == "__main__":
    found = calibrate()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(machine_toml(found))
        print(f"{sys.argv[1]}: {machine_toml(found)}")
        if found.doubt:
            print(f"distconv calibrate: {sys.argv[1]} was {found.doubt}; run it again later", file=sys.stderr)
