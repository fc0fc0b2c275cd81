"""WD at work: who holds how much of the total, at every moment, and that results stay right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mucudnn
from mucudnn.budgets import total
from mucudnn.budgets.total import Ledger, Menu, Shares
from mucudnn.convolution.tile import Part
from mucudnn.optimizer import Division, Option, divide_workspace
from mucudnn.planning import planner
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.onednn import OneDnn
from mucudnn.timing import clock
from mucudnn.timing.measurement import Measurement

KIB = 2**10
MIB = 2**20


# Who holds how much.


def menu(*costs: tuple[float, int]) -> Menu:
    """Of (seconds, bytes)."""
    return Menu([Division((Option(1, "a", seconds, size),)) for seconds, size in costs])


menus = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4).map(lambda costs: menu((10, 0), *costs))


def held(shares: Shares) -> int:
    return sum(kernel.share for kernel in shares.kernels.values())


@given(st.lists(menus, min_size=1, max_size=5), st.lists(st.integers(0, 14), max_size=80), st.integers(0, 30))
def test_shares_never_add_up_to_more_than_the_total(kinds: list[Menu], names: list[int], total: int) -> None:
    shared = Shares(total)
    for name in names:
        kernel = shared.call(name, kinds[name % len(kinds)])
        assert kernel is not None and kernel.share == (kernel.division.workspace if kernel.division else 0)
        assert held(shared) <= total


@given(st.lists(menus, min_size=1, max_size=6), st.integers(0, 30))
def test_a_second_round_has_the_best_division(kinds: list[Menu], total: int) -> None:
    shared = Shares(total)
    for number, kind in enumerate(kinds):
        kernel = shared.call(number, kind)
        assert kernel is not None and kernel.division is None
    best = divide_workspace([kind.divisions for kind in kinds], total)
    for _ in range(2):
        assert [shared.call(number, kind).division for number, kind in enumerate(kinds)] == best  # type: ignore[union-attr]


def test_a_new_kernel_holds_nothing_until_the_next_round() -> None:
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    for _ in range(2):
        shared.call("a", kind)
    assert shared.kernels["a"].share == 10
    faster = menu((100, 0), (1, 10))
    shared.call("b", faster)
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (10, 0)
    shared.call("a", kind)  # it was last called before the new one
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (10, 0)
    shared.call("b", faster)
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (0, 10)


def test_a_changed_menu_divides_again() -> None:
    shared, kinds = Shares(10), {"a": menu((10, 0), (1, 10)), "b": menu((9, 0), (1, 10))}
    for _ in range(2):
        for name, kind in kinds.items():
            shared.call(name, kind)
    assert [kernel.share for kernel in shared.kernels.values()] == [10, 0]
    kinds["a"].divisions = kinds["a"].divisions[:1]
    shared.change()
    for _ in range(2):
        for name, kind in kinds.items():
            shared.call(name, kind)
    assert [kernel.share for kernel in shared.kernels.values()] == [0, 10]


def test_what_is_no_longer_called_gives_its_share_back() -> None:
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    for _ in range(2):
        shared.call("old", kind)
    for _ in range(3 * total.STALE):
        shared.call("new", menu((5, 0), (1, 10)))
    assert list(shared.kernels) == ["new"]
    assert shared.kernels["new"].share == 10


def test_weights_that_are_always_new_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(total, "MOST_KERNELS", 5)
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    assert sum(shared.call(name, kind) is not None for name in range(20)) == 5


# What is in use.


def test_a_ledger_gives_no_more_than_there_is() -> None:
    ledger = Ledger(10)
    assert ledger.take(6) and not ledger.take(5) and ledger.take(4)
    ledger.give(6)
    assert ledger.take(6)


def test_a_ledger_in_many_threads() -> None:
    ledger, lock = Ledger(10), threading.Lock()
    now = most = 0

    def use(size: int) -> None:
        nonlocal now, most
        for _ in range(300):
            if ledger.take(size):
                with lock:
                    now += size
                    most = max(most, now)
                with lock:
                    now -= size
                ledger.give(size)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, (3, 4, 5, 6)))
    assert 0 < most <= 10


def test_measuring_waits_for_others_and_holds_them_off() -> None:
    ledger, order = Ledger(10), []
    assert ledger.take(1)

    def measure() -> None:
        with ledger.alone():
            order.append("alone")

    thread = threading.Thread(target=measure)
    thread.start()
    while ledger.take(0):  # until the other thread waits
        ledger.give(0)
    assert not ledger.take(9)
    order.append("given back")
    ledger.give(1)
    thread.join()
    assert order == ["given back", "alone"]
    assert ledger.take(10)


# In a program.


class Meter:
    """Counts the workspace that launches of all threads hold at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._now = self.launches = 0
        self._lock = threading.Lock()
        for provider in (Fft, Gemm, OneDnn):
            monkeypatch.setattr(provider, "launch", self._metered(provider.launch))

    def _metered(self, launch: Callable[..., None]) -> Callable[..., None]:
        def metered(provider: planner.Provider, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
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
    monkeypatch.setattr(clock, "ratio", lambda work, baseline, timer=None: (work(), 0.1)[1])


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
    launches = [option for option in known if not option.algorithm.startswith("division ")]
    assert len(timed) == len(launches) > 0


def test_divisions_that_disappoint_give_their_workspace_back(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)

    def ratio(work: clock.Work, baseline: clock.Work, clock: object = None) -> float:
        return 2.0  # nothing holds against torch's own kernel

    monkeypatch.setattr(clock, "ratio", ratio)
    module = network()
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        train(module, 30)
        records = session.records()
    assert {(record.workspace, record.limit, record.division) for record in records} == {(0, 0, "stock(8)")}


def test_where_memory_runs_out_while_a_share_is_measured_torch_serves(
    slow_stock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(network(), 30)

    def exhausted(self: Measurement, *_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Measurement, "division_seconds", exhausted)
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        with pytest.warns(RuntimeWarning, match="left to torch, as it could not be measured: CUDA out of memory"):
            assert train(network(), 30) == pytest.approx(expected, rel=1e-10)
        records = session.records()
    assert {(record.workspace, record.limit, record.division) for record in records} == {(0, 0, "stock(8)")}


def test_records_tell_of_what_came_on_the_menu_later(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first division that is confirmed disappoints, so that another one, at corrected times, takes its place."""
    counts = iter(range(10**6))
    monkeypatch.setattr(
        clock, "ratio", lambda work, baseline, timer=None: (work(), 2.0 if next(counts) % 2 == 0 else 0.5)[1]
    )
    module = network()
    with mucudnn.patched(total_workspace_size=MIB, database=":memory:") as session:
        for _ in range(6):
            train(module, 1)
            assert sum(record.limit for record in session.records()) <= MIB


def test_a_share_of_nothing_may_use_what_needs_nothing(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemm, "workspace", lambda self, problem, algorithm: 0)
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


def test_arrays_are_convolved_within_the_total_too(slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    x, weights = generator.standard_normal((8, 3, 12, 12)), generator.standard_normal((2, 4, 3, 5, 5))
    expected = [torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w)).numpy() for w in weights]
    meter = Meter(monkeypatch)
    with mucudnn.patched(total_workspace_size=200 * KIB, database=":memory:"):
        for _ in range(3):
            for w, result in zip(weights, expected, strict=True):
                np.testing.assert_allclose(mucudnn.convolve(x, w), result, rtol=1e-10, atol=1e-12)
    assert meter.launches and meter.most <= 200 * KIB
