"""What is known of an algorithm before it was ever timed: its operations, and the bytes that it writes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from references import operands

from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.devices import Host, device_of, speeds
from mucudnn.planning.planner import Planner
from mucudnn.planning.search import Search
from mucudnn.providers import HOST_PROVIDERS
from mucudnn.providers.provider import Effort
from mucudnn.providers.strips import strips_of
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.store import Store

LONG = ConvProblem.of_convolution(
    Direction.FORWARD, (2, 8, 16000), (8, 8, 1024), stride=(1,), padding=(512,), dilation=(1,)
)
"""Its columns are of 1 GB."""


def search(problem: ConvProblem) -> Search:
    planner = Planner(Settings.from_environment({}, database=MEMORY), Store(MEMORY))
    return planner.search(planner.measurement(problem, operands(problem)))


def tried(problem: ConvProblem, stock_seconds: float) -> dict[str, float]:
    """The algorithms that may be tried beside parts of torch's own, with their expected seconds."""
    found = search(problem)._variants(stock_seconds)
    return {
        variant.algorithm: variant.seconds for variant in found if variant.workspaces and variant.algorithm != "stock"
    }


@pytest.fixture
def _speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of 100 GFLOP/s that writes 50 GB/s to memory that it has, and 2 to fresh pages."""
    monkeypatch.setattr(speeds, "operations", lambda *_: 1e11)
    monkeypatch.setattr(speeds, "writing_speed", lambda is_large, _: 2e9 if is_large else 5e10)


@pytest.mark.usefixtures("_speeds")
def test_columns_that_take_longer_to_write_than_the_whole_are_not_tried() -> None:
    expected = tried(LONG, stock_seconds=0.06)
    assert set(expected) == {"fft"} and expected["fft"] < 0.06
    assert "gemm" in tried(LONG, stock_seconds=9.0)


@pytest.mark.usefixtures("_speeds")
def test_parts_take_the_effort_of_the_whole_together() -> None:
    for provider in HOST_PROVIDERS:
        one, four = (provider.effort(LONG, "fft", count) for count in (1, 4))
        if one is not None and four is not None:
            assert four.written >= one.written and four.operations >= one.operations
    ((fft, _),) = [(one, name) for one in HOST_PROVIDERS for name in one.algorithms(LONG) if name == "fft"]
    ((strips),) = strips_of(LONG, Dim.BATCH, fft, "fft")[:1]
    assert strips.effort(LONG, strips.name).operations > 0


def test_bytes_of_large_tensors_are_distinguished() -> None:
    assert Effort.of(3, 1, speeds.LARGE, times=2) == (6, 2 + 2 * speeds.LARGE, 2 * speeds.LARGE)
    assert Effort.of(1).plus(Effort.of(2, 5)) == (3, 5, 0)


@pytest.mark.parametrize(
    "measure", [lambda: speeds.operations(torch.float32, 1), lambda: speeds.writing_speed(False, 1)]
)
def test_speeds_are_measured(measure: Callable[[], float]) -> None:
    assert math.isfinite(measure()) and measure() > 1e6
    assert isinstance(device_of(torch.device("cpu")), Host)


def test_speeds_that_were_measured_beside_other_work_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first moment the processor seems to do a fiftieth of what it does."""
    host, slow = device_of(torch.device("cpu")), speeds._now
    monkeypatch.setattr(speeds, "_known", {})
    monkeypatch.setattr(speeds, "_now", lambda kind: slow(kind) / 50)
    first = host.least_seconds(1e9, 1e6, 0.0, torch.float32)
    monkeypatch.setattr(speeds, "_now", slow)
    for _ in range(2 * speeds.MOMENTS):
        host.measure_speeds(torch.float32)
    assert host.least_seconds(1e9, 1e6, 0.0, torch.float32) < first / 10
    assert all(moments == speeds.MOMENTS for _, moments in speeds._known.values()), "it ends"


def test_a_launch_that_is_faster_than_its_bound_raises_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_known", {})
    monkeypatch.setattr(speeds, "_now", lambda kind: 1e9)
    assert set(tried(LONG, stock_seconds=0.06)) == set(), "nothing seems to be fast enough"
    found = search(LONG)
    found.note((str(Dim.BATCH), "fft", 2), 0.004)
    assert set(tried(LONG, stock_seconds=0.06)) >= {"fft"}
