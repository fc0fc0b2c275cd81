"""Programs whose convolutions share a total of workspace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import mucudnn
from benchmarks.drawn_times import drawn_times
from mucudnn.convolution.call import Operands
from mucudnn.convolution.tile import Part
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import Provider
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.onednn import OneDnn
from mucudnn.providers.stock import Stock
from mucudnn.timing import clock
from mucudnn.timing.measurement import Measurement

pytestmark = pytest.mark.usefixtures("ahead")

KIB = 2**10
MIB = 2**20


class Meter:
    """Counts the workspace that launches of all threads hold at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._now = self.launches = 0
        self._lock = threading.Lock()
        for provider in (Fft, Gemm, OneDnn):
            monkeypatch.setattr(provider, "launch", self._metered(provider.launch))

    def _metered(self, launch: Callable[..., None]) -> Callable[..., None]:
        def metered(provider: Provider, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
            size = max(provider.workspace(part.problem, algorithm) for part in parts)
            with self._held(size):
                launch(provider, algorithm, parts, accumulate)

        return metered

    @contextmanager
    def _held(self, size: int) -> Iterator[None]:
        with self._lock:
            self._now += size
            self.most = max(self.most, self._now)
            self.launches += 1
        yield
        with self._lock:
            self._now -= size


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is timed once."""
    monkeypatch.setattr(clock, "seconds", clock.first_seconds)


@pytest.fixture
def slow_stock(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernel looks slow, so that workspace is always worth having."""
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)


def network() -> nn.Sequential:
    """Four layers of two shapes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2),
        *(nn.Conv2d(4, 4, 5, padding=2) for _ in range(3)),
        nn.Flatten(),
        nn.Linear(4 * 12 * 12, 2),
    ).double()


def train(module: nn.Module, steps: int, batches: Sequence[int] = (8,)) -> list[float]:
    """The losses of some steps of SGD."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(batches[step % len(batches)], 3, 12, 12, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("total", "batches"),
    [(100 * KIB, (6, 3)), (500 * KIB, (6, 6, 6, 4)), (20 * MIB, (6, 6, 6, 4))],
    ids=["little, changing batches", "some, the last batch is smaller", "plenty"],
)
def test_a_program_trains_as_ever_within_the_total(
    total: int, batches: tuple[int, ...], slow_stock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(network(), 8, batches)
    module, meter = network(), Meter(monkeypatch)
    with mucudnn.patched(total_workspace_size=total, database=":memory:") as session:
        assert train(module, 8, batches) == pytest.approx(expected, rel=1e-10)
        records = session.records()
    assert sum(record.limit for record in records) <= total
    assert all(record.workspace <= record.limit for record in records)
    assert meter.launches > 0 and meter.most <= total
    assert sum(record.workspace > 0 for record in records) >= (1 if total < MIB else 4)


def test_every_layer_and_direction_is_a_kernel(slow_stock: None) -> None:
    module = network()
    with mucudnn.patched(total_workspace_size=500 * KIB, database=":memory:") as session:
        train(module, 3)
        records = session.records()
    assert len(records) == 11  # the first layer's data has no gradient
    assert len({record.problem for record in records}) == 5


def test_identical_layers_are_measured_once(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []
    first_seconds = clock.first_seconds

    def counted(*arguments: Any) -> float:
        timed.append(arguments)
        return first_seconds(*arguments)

    monkeypatch.setattr(clock, "first_seconds", counted)
    with mucudnn.patched(total_workspace_size=500 * KIB, database=":memory:") as session:
        train(network(), 3)
        known = [option for _, options in session.store.contents() for option in options]
    launches = [one for one in known if not one.algorithm.startswith("division ") and one.seconds < 1e3]
    assert len(timed) == len(launches) > 0


def test_divisions_that_disappoint_give_their_workspace_back(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)

    def laps(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        return [1e3 if trial.division is None else 2e3]  # nothing holds against torch's own kernel

    monkeypatch.setattr(TrialRunner, "laps", laps)
    module = network()
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        train(module, 4)
        records = session.records()
    assert {(record.workspace, record.division) for record in records} == {(0, "stock(8)")}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    ],
)
def test_where_memory_runs_out_while_a_share_is_measured_torch_serves(
    error: RuntimeError, slow_stock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(network(), 30)

    own = TrialRunner.laps

    def exhausted(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        if runner._search.limit < MIB:
            raise error
        return own(runner, trial, given)

    monkeypatch.setattr(TrialRunner, "laps", exhausted)
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        with pytest.warns(RuntimeWarning, match=f"left to torch, as it could not be measured: {error}"):
            assert train(network(), 30) == pytest.approx(expected, rel=1e-10)
        records = session.records()
    assert {(record.workspace, record.limit, record.division) for record in records} == {(0, 0, "stock(8)")}


def test_shares_settle_in_the_first_steps(quick: None) -> None:
    """Though within most shares another division wins than the times of launches promise."""
    settled = []
    for seed in range(8):
        module, seen = network(), []
        with drawn_times(seed), mucudnn.patched(total_workspace_size=300 * KIB, database=":memory:") as session:
            for _ in range(6):
                train(module, 1)
                seen.append([(record.limit, record.division) for record in session.records()])
        assert sum(limit for limit, division in seen[-1] if division != "stock(8)") > 0
        settled.append(1 + next(step for step in range(6) if all(each == seen[-1] for each in seen[step:])))
    assert sum(step <= 3 for step in settled) >= 6 and max(settled) <= 5, settled


def test_shares_are_kept_where_other_divisions_win(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(10**6))

    def laps(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        runner.run(trial, given)
        return [1e3 if trial.division is None else (2e3, 0.5e3)[next(counts) % 2]]

    monkeypatch.setattr(TrialRunner, "laps", laps)
    module = network()
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        for _ in range(6):
            train(module, 1)
            assert sum(record.limit for record in session.records() if record.workspace) <= MIB


def test_a_share_of_nothing_may_use_what_needs_nothing(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemm, "workspace", lambda self, problem, algorithm: 0)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    monkeypatch.setattr(Fft, "algorithms", lambda self, problem: ())
    monkeypatch.setattr(OneDnn, "algorithms", lambda self, problem: ())
    with mucudnn.patched(total_workspace_size=1, database=":memory:") as session:
        train(network(), 4)
        assert all("gemm" in record.division for record in session.records())


def test_many_threads_stay_within_the_total(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model served by several threads: the same kernels run at the same time, and each call needs its own."""
    module = network()
    x = torch.randn(8, 3, 12, 12, dtype=torch.float64)
    expected = module(x)
    total = 600 * KIB
    meter = Meter(monkeypatch)

    def serve(_: int) -> bool:
        with torch.no_grad():
            return all(torch.allclose(module(x), expected, rtol=1e-10, atol=1e-12) for _ in range(20))

    with mucudnn.patched(total_workspace_size=total, database=":memory:"), ThreadPoolExecutor(4) as threads:
        assert all(threads.map(serve, range(4)))
    assert meter.launches and meter.most <= total


def test_a_limit_holds_beside_the_total(slow_stock: None) -> None:
    with mucudnn.patched(workspace_limit=100 * KIB, total_workspace_size=MIB, database=":memory:") as session:
        train(network(), 3)
        records = session.records()
    assert 0 < max(record.workspace for record in records) <= 100 * KIB


def test_a_total_of_zero_leaves_everything_to_torch(slow_stock: None) -> None:
    with mucudnn.patched(total_workspace_size=0, database=":memory:") as session:
        train(network(), 3)
        assert session.records() == []
