"""What distconv asks of CUDA, tried on a host: stand-ins take the place of streams, devices and meshes."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import missing_for_mpi
from torch.utils.data import DataLoader, TensorDataset

from distconv.job import data
from distconv.job.data import loading
from distconv.job.samples import ToDevice
from distconv.model import parallelize
from distconv.model.interface import _take_gpu


def test_what_ranks_import_before_they_are_forked_asks_for_no_gpu() -> None:
    """CUDA does not work in a process that was forked after it was asked for."""
    forks = """
import os
import torch
def refuse(*_): raise SystemExit("a GPU was asked for")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
from distconv.job.launcher import Job, split_process
from distconv.settings.partition import Partition
os.environ["DISTCONV_STARTER"] = str(os.getppid())
result = split_process(Job(Partition.parse("sample=2"), "script.py"))
raise SystemExit(result if isinstance(result, int) else 0)
"""
    assert subprocess.run([sys.executable, "-c", forks], check=False).returncode == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_backward_thread_is_reported_once_in_any_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "_mixing", set())
    told: list[bool] = []
    monkeypatch.setattr(parallelize, "mix_plain_tensors", lambda: told.append(True))
    with mode():
        parallelize.mix_in_backward(torch.device("cpu"))
        parallelize.mix_in_backward(torch.device("cpu"))
        assert torch.is_grad_enabled() is False
    assert len(told) == 1


GPUS = {
    "torchrun": ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"}, 0, 4, 1),
    "more ranks than GPUs": (
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "3"},
        0,
        2,
        1,
    ),
    "mpiexec": ({"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"}, 0, 4, 2),
    "alone": ({}, 0, 4, 0),
    "chosen by the program": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"},
        3,
        4,
        3,
    ),
}
"""The environment, the current GPU, how many there are, and the current GPU afterwards."""


@pytest.mark.parametrize("how", GPUS)
def test_a_rank_takes_the_gpu_of_its_local_rank(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, current, count, expected = GPUS[how]
    taken = [current]
    for name in [name for name in os.environ if name in {key for given, *_ in GPUS.values() for key in given}]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    _take_gpu()
    assert taken[-1] == expected


def draws_on_the_host() -> tuple[list[float], bool]:
    """Batches of a mesh of GPUs that are not there: its random states must not go to them."""
    mesh: Any = SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=("sample",), device_type="cuda")
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    with loading(mesh):
        batches = [batch for (batch,) in DataLoader(TensorDataset(torch.arange(6.0)), 2, shuffle=True)]
        alike = random.random()
    return [*torch.cat(batches).tolist(), alike], dist.get_rank() == 0


def test_random_states_travel_between_hosts(ranks: Any) -> None:
    (first, _), (second, _) = ranks(2).run(draws_on_the_host)
    assert first == second


def test_over_nccl_random_states_have_a_group_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options))
    mesh: Any = SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=("sample",), device_type="cuda")
    with loading(mesh):
        pass
    assert made == [{"backend": "gloo", "use_local_synchronization": False}]


def test_random_states_are_those_of_the_ranks_gpu_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()  # as CUDA has it: a new thread begins with device 0
    seen: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current.index = getattr(current, "index", 0), index
        yield
        current.index = before

    current.index = 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: object())
    monkeypatch.setattr(data, "ranks_here", lambda group: 2)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: seen.append(torch.cuda.current_device()))
    mesh: Any = SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=("sample",), device_type="cuda")
    with loading(mesh):
        thread = threading.Thread(target=lambda: list(DataLoader(TensorDataset(torch.arange(4.0)), 2)))
        thread.start()
        thread.join()
    assert len(seen) > 2 and set(seen) == {3}


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"the event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} is waited for")


@pytest.mark.skipif(missing_for_mpi() is not None, reason=str(missing_for_mpi()))
def test_results_over_mpi_are_put_in_place_after_what_the_issuer_had_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    from distconv.mpi.work import MPIWork

    log: list[str] = []
    current = _Stream("the issuer's stream", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    output: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), is_inference=lambda: False)
    work = MPIWork([], [output], (), [lambda: log.append("the copy")], timedelta(seconds=5))
    current = _Stream("the finder's stream", log)
    assert work.wait()
    assert log == [
        "the issuer's stream records",
        "the finder's stream waits for the event of the issuer's stream",
        "the copy",
        "the finder's stream is waited for",
    ]


class Streams:
    """Stands in for torch.cuda: which stream is current, and what was done in which."""

    def __init__(self) -> None:
        self.now, self.done = "the program's", list[tuple[str, str]]()

    def is_available(self) -> bool:
        return True

    def Stream(self) -> str:
        return "the copies'"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.done.append((self.now, f"waits for {other}")))


class OnHost:
    """Stands in for a tensor of the host, and for its copy on the GPU."""

    device = torch.device("cpu")

    def __init__(self, streams: Streams) -> None:
        self.streams, self.pinned = streams, False

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> OnHost:
        made = OnHost(self.streams)
        made.pinned = True
        return made

    def to(self, device: str, *, non_blocking: bool = False) -> OnHost:
        self.streams.done.append((self.streams.now, f"copies, {self.pinned=}, {non_blocking=}"))
        return self

    def record_stream(self, stream: Any) -> None:
        self.streams.done.append((self.streams.now, "holds the memory"))


def test_a_batch_is_copied_beside_what_the_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "cuda", streams)
    x: Any = OnHost(streams)
    ToDevice("cuda")(x)
    assert streams.done == [
        ("the copies'", "copies, self.pinned=True, non_blocking=True"),
        ("the program's", "waits for the copies'"),
        ("the program's", "holds the memory"),
    ]
    plain = torch.arange(3.0)
    assert ToDevice("cpu")(plain) is plain
