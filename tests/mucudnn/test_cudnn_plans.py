"""cuDNN's plans on a simulated cuDNN: when they are made, how long they live, and who may use them at once."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from references import TOLERANCE, operands, reference, relative_error
from simulated_card import SimulatedCard
from simulated_cudnn import SimulatedCudnn

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import tiles
from mucudnn.optimizer import Division, Option
from mucudnn.planning.planner import Planner
from mucudnn.providers import Provider
from mucudnn.providers.cudnn import card as cards
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.launch import ReadyLaunch
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.providers.cudnn.plans import MOST_RECENT
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing import clock
from mucudnn.timing.logbook import Environment, Logbook
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.schedule import LaunchError, Schedule
from mucudnn.timing.store import Store

PLAIN = ConvProblem.of_convolution(
    Direction.FORWARD, (64, 2, 5, 5), (2, 2, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)
ENVIRONMENT = Environment("test", threads=1, deterministic=False, precision="", libraries="")
GPU = torch.device("cuda", 0)


def schedule_of(problem: ConvProblem, provider: Provider, algorithm: str, *sizes: int) -> Schedule:
    division = Division(tuple(Option(size, algorithm, 0.0, 0) for size in sizes))
    return Schedule(problem, division, {algorithm: provider})


# When they are made


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans `PLAIN` under policy `all` with made-up times: torch's kernel a second, every part of one engine a little,
    everything else forever.
    """

    def plan(card: SimulatedCard, promising: str, database: str = MEMORY) -> list[str]:
        timed: list[str] = []

        def seconds(work: clock.Work, *others: object) -> float:
            work()
            timed.append(card.simulated.executed[-1])
            return 1e-3 if timed[-1] == promising else 1e3

        for name in ("first_seconds", "again_seconds"):
            monkeypatch.setattr(clock, name, seconds)
        monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1.0)
        settings = Settings.from_environment({}, policy="all", database=database, progress="off")
        planner = Planner(settings, Store(database), providers=(Engines(card),))
        planner.plan(planner.measurement(PLAIN, operands(PLAIN)), 2**20)
        return timed

    return plan


def test_an_algorithm_that_cannot_win_is_hardly_timed(planned: Any) -> None:
    card = SimulatedCard()
    timed = planned(card, "eng1")
    assert timed.count("eng1") > 0
    for engine in (0, 2, 3):
        assert timed.count(f"eng{engine}") <= 3  # at its smallest size and at a large one, and once along space


def test_plans_that_nobody_runs_are_freed(planned: Any) -> None:
    card = SimulatedCard()
    planned(card, "eng1")
    gc.collect()
    assert card.simulated.finalized.total() > 80
    assert card.simulated.live_plans <= MOST_RECENT


def test_what_a_schedule_holds_lives_and_is_shared() -> None:
    card = SimulatedCard()
    engines = Engines(card)
    given = operands(PLAIN)
    first, second = (schedule_of(PLAIN, engines, "eng1", 40, 24) for _ in range(2))
    first.run(given)
    for size in range(1, 2 * MOST_RECENT):
        assert engines.serves(PLAIN.with_extent(size), "eng0")
    made = card.simulated.finalized[1]
    first.run(given)
    second.run(given)
    assert card.simulated.finalized[1] == made == 2
    assert relative_error(given.y, reference(PLAIN, given)) <= TOLERANCE["float32"]


def test_what_algorithms_need_is_in_the_database(tmp_path: Path) -> None:
    path = str(tmp_path / "times.sqlite")

    def ask(card: SimulatedCard) -> list[int | None]:
        measurement = Measurement(PLAIN, Logbook(ENVIRONMENT, Store(path)), operands(PLAIN), device=GPU)
        engines = Engines(card)
        return [measurement.workspace((engines, name), Dim.BATCH, 8) for name in ("eng0", "eng1", "eng5")]

    cards = SimulatedCard(), SimulatedCard()
    assert ask(cards[0]) == ask(cards[1]) == [0, 8 * 1024, None]
    assert cards[0].simulated.finalized.total() == 2 and cards[1].simulated.finalized.total() == 0


def test_a_refusal_for_want_of_something_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "times.sqlite")

    def ask(card: SimulatedCard) -> int | None:
        measurement = Measurement(PLAIN, Logbook(ENVIRONMENT, Store(path)), operands(PLAIN), device=GPU)
        return measurement.workspace((Engines(card), "eng1"), Dim.BATCH, 8)

    short = SimulatedCard()
    monkeypatch.setattr(short.simulated, "cudnnBackendFinalize", lambda descriptor: 4000)
    assert ask(short) is None
    assert ask(SimulatedCard()) == 8 * 1024


# Alignment


def test_only_offsets_that_occur_cost_alignment() -> None:
    """Samples of an odd number of half-type elements: whole, and cut into eights, they start at multiples of 16."""
    problem = replace(PLAIN, x_shape=(64, 3, 7, 7), w_shape=(3, 3, 3, 3), y_shape=(64, 3, 7, 7), dtype="float16")
    assert problem.alignment == 16
    assert [tile.problem.alignment for tile in tiles(problem, Dim.BATCH, (64,))] == [16]
    assert [tile.problem.alignment for tile in tiles(problem, Dim.BATCH, (8, 8, 2, 1))] == [16, 16, 16, 4]
    measurement = Measurement(problem, Logbook(ENVIRONMENT, Store(MEMORY)))
    asked: list[tuple[int, int]] = []

    class Recording(Engines):
        def workspace(self, problem: ConvProblem, algorithm: str) -> int:
            asked.append((problem.extent, problem.alignment))
            return super().workspace(problem, algorithm)

    engines = Recording(SimulatedCard())
    for size in (64, 8, 1):
        measurement.workspace((engines, "eng0"), Dim.BATCH, size)
    assert set(asked) == {(64, 16), (8, 16), (1, 16), (1, 2)}


def test_a_part_that_is_not_served_where_it_lies_is_a_failed_launch() -> None:
    problem = replace(PLAIN, x_shape=(64, 1, 5, 5), w_shape=(1, 1, 3, 3), y_shape=(64, 1, 5, 5))
    schedule = schedule_of(problem, Engines(SimulatedCard()), "eng5", 63, 1)
    with pytest.raises(LaunchError, match=r"eng5 on a part of 63.*engine 5 serves nothing"):
        list(schedule.workspaces())


# Half-type weight gradients


@pytest.mark.parametrize("provider, algorithm", [(Engines, "eng0"), (Legacy, "legacy_fft")])
def test_an_undivided_half_weight_gradient_goes_straight_to_its_place(
    provider: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(PLAIN, direction=Direction.BACKWARD_FILTER, dtype="float16")
    card = SimulatedCard()
    serving = provider(card)
    given = operands(problem)
    given.w.fill_(float("nan"))
    made: list[torch.dtype] = []
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **o: made.append(o.get("dtype")) or empty(*a, **o))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: made.append(o.get("dtype")) or empty_like(*a, **o))
    whole = schedule_of(problem, serving, algorithm, 64)
    whole.run(given)
    assert not {torch.float16, torch.float32} & set(made)
    assert relative_error(given.w, reference(problem, given)) <= TOLERANCE["float16"]
    assert max(whole.workspaces()) == serving.workspace(problem, algorithm)
    parts = schedule_of(problem, serving, algorithm, 40, 24)
    parts.run(given)
    assert torch.float32 in made
    assert relative_error(given.w, reference(problem, given)) <= TOLERANCE["float16"]
    own = max(serving.workspace(problem.with_extent(size), algorithm) for size in (40, 24))
    assert max(parts.workspaces()) == own + 6 * given.w.numel()


# Threads and handles


def test_one_thread_at_a_time_executes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimulatedCard()
    engines = Engines(card)
    inside, most = 0, 0
    execute = SimulatedCudnn.cudnnBackendExecute

    def watched(self: SimulatedCudnn, *arguments: Any) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(2e-3)
        try:
            return execute(self, *arguments)
        finally:
            inside -= 1

    monkeypatch.setattr(SimulatedCudnn, "cudnnBackendExecute", watched)
    schedule = schedule_of(PLAIN, engines, "eng0", 64)
    targets = [operands(PLAIN) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda given: [schedule.run(given) for _ in range(4)], targets))
    assert most == 1
    for given in targets:
        assert relative_error(given.y, reference(PLAIN, given)) <= TOLERANCE["float32"]


def test_plans_are_made_with_a_handle_that_no_thread_runs_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "library", SimulatedCudnn)
    monkeypatch.setattr(cards, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: card_current)
    card_current: Any = threading.Lock()  # any context manager
    card = Card(0)
    used: list[c_void_p] = []
    threads = [threading.Thread(target=lambda: used.append(card.handle())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    used.append(card.handle())
    with card.planning() as device:
        assert device.handle is not None and device.handle.value not in {handle.value for handle in used}


def test_parts_are_timed_on_other_samples_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds one micro-batch must not hold the next."""
    read: list[int] = []

    run = ReadyLaunch.run

    def watched(launch: ReadyLaunch, operands: Operands) -> bool:
        read.append(operands.x.data_ptr())
        return run(launch, operands)

    monkeypatch.setattr(ReadyLaunch, "run", watched)
    for name in ("first_seconds", "again_seconds"):
        monkeypatch.setattr(clock, name, lambda work, *others: [work() for _ in range(8)] and 0.0)
    given = operands(PLAIN)
    measurement = Measurement(PLAIN, Logbook(ENVIRONMENT, Store(MEMORY)), given)
    measurement.seconds((Engines(SimulatedCard()), "eng1"), Dim.BATCH, 4, 1.0)
    step = 4 * given.x.stride(0) * given.x.element_size()
    assert read == [given.x.data_ptr() + number * step for number in range(16)]
