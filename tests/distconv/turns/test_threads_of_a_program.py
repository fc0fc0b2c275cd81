"""Calls in turn beside other threads, and other calls: each has its own limit, groups and settings."""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives

import distconv
from distconv import settings
from distconv.transfer.tracing import is_traced, shapes_followed
from distconv.turns import pager, places, turning
from distconv.turns.surroundings import Surroundings


class Waiting(nn.Module):
    """The identity, which lets another thread run in between."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.reached.set()
        assert self.go_on.wait(60)
        return x * 1


def model() -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1), nn.Tanh()
    return nn.Sequential(*layers).double()


def test_another_thread_does_not_meet_what_a_call_needs() -> None:
    x, waiting = torch.randn(1, 2, 8, 8, dtype=torch.float64), Waiting()
    turned = distconv.in_turn(nn.Sequential(model(), waiting), "height=2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ThreadPoolExecutor() as pool:
            call = pool.submit(turned, x)
            assert waiting.reached.wait(60)
            try:
                seen: list[Any] = [settings.value("check"), turning._plan_of(turned) is not None]
                seen.append(collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist())
            finally:
                waiting.go_on.set()
            torch.testing.assert_close(call.result(), turned[0](x))
        assert seen == ["on", True, [1.0, 1.0]]
    finally:
        dist.destroy_process_group()


def test_what_another_thread_traces_is_of_a_graph_while_a_call_is_followed() -> None:
    """The call is followed in the threads of its parts, which have its surroundings."""

    def asked(surroundings: Surroundings | None) -> bool:
        return is_traced(x) if surroundings is None else surroundings.run(lambda: is_traced(x))

    with FakeTensorMode():
        x = torch.empty(2)
    with ThreadPoolExecutor() as pool, shapes_followed():
        assert [pool.submit(asked, one).result() for one in (None, Surroundings.now("cpu"))] == [True, False]
    assert is_traced(x)


def trained(turned: nn.Module, x: Tensor, between: Any = None) -> tuple[int, list[Tensor]]:
    """The most bytes of the pager in a backward, and the gradients."""
    turned.zero_grad()
    y = turned(x).square().sum()
    if between is not None:
        between()
    found = pager.pager_of("cpu")
    found.most = 0
    y.backward()
    return found.most, [p.grad.clone() for p in turned.parameters() if p.grad is not None]


def test_a_backward_keeps_its_calls_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    x = torch.randn(2, 2, 16, 16, dtype=torch.float64)
    little, much = (distconv.in_turn(model(), "height=4", memory=limit) for limit in (4096, "1GiB"))

    def another() -> None:
        with torch.no_grad():
            much(x)

    alone, beside = trained(little, x), trained(little, x, another)
    assert alone[0] == beside[0] and alone[0] < 65536
    assert trained(much, x)[0] > alone[0]


def test_calls_of_many_threads_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    x = torch.randn(2, 2, 16, 16, dtype=torch.float64)
    plain = [model() for _ in range(3)]
    ways = zip(plain, ("height=2", "height=4", "width=2"), (2048, 8192, 4096), strict=True)
    turned = [distconv.in_turn(copy.deepcopy(each), parts, memory=memory) for each, parts, memory in ways]
    right = [trained(each, x)[1] for each in plain]

    def work(number: int) -> list[list[Tensor]]:
        return [trained(turned[number], x)[1] for _ in range(4)]

    with ThreadPoolExecutor() as pool:
        for number, steps in enumerate(pool.map(work, range(3))):
            for gradients in steps:
                torch.testing.assert_close(gradients, right[number])
    found = pager.pager_of("cpu")
    assert found.resident >= 0 and found.away >= 0


class Stream:
    """What a GPU's stream is asked."""

    device = torch.device("cuda", 0)

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self.name = told, name

    def record_event(self) -> str:
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._told.append(f"{self.name} waits for the {event}")

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")


class Bytes:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def copy_(self, *_: Any, **__: Any) -> None:
        self._told.append("copy")

    def __len__(self) -> int:
        return 0

    def __getitem__(self, _: slice) -> Bytes:
        return self


def test_memory_that_leaves_a_gpu_is_reused_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    one, two = Stream(told, "one"), Stream(told, "two")
    copying = iter([Stream(told, "out"), Stream(told, "back")])
    monkeypatch.setattr(places, "_bytes", lambda storage: Bytes(told))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Bytes(told))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(copying))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    place, storage = places.Pinned(), torch.zeros(4).untyped_storage()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: one)
    key: Any = place.write(storage, one)  # type: ignore[arg-type]
    assert told == ["out waits for one", "copy"]
    place.read(key, storage)
    assert told[2:] == ["back waits for one", "back waits for the event of out", "copy"]
    place.finish(key, one)  # type: ignore[arg-type]
    assert told[5:] == ["one waits for the event of back"]
    place.drop(key, 16)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: two)
    assert place.write(storage, two) is key  # type: ignore[arg-type, comparison-overlap]
    assert told[6:] == ["out waits for two", "out waits for the event of back", "copy"]
