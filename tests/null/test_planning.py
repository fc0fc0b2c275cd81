"""What planning asks of the real cuDNN: plans, engines that are compiled at run time, launches."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Option
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.providers.cudnn.backend import Behavior
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.graph import Engine, OperationGraph
from mucudnn.settings import Settings
from mucudnn.timing.logbook import CompiledPlans
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store

GPU = torch.device("cuda", 0)
MOST_PLANS, MOST_COMPILED, MOST_LAUNCHES = 40, 2, 300
LIMITS = 2**20, 2**26
COMPILED = "eng71"
"""An engine that cuDNN 9.24 compiles at run time, for a 3x3 forward convolution in TF32 among others."""


@pytest.fixture(autouse=True)
def only_counted(card: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No convolution is computed; torch is left with the precision that it had."""
    monkeypatch.setenv("NULL_CARD_CONVOLUTIONS", "0")
    monkeypatch.setenv("NULL_CARD_ARITHMETIC", "0")
    precision = torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cudnn.conv.fp32_precision = precision


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that were compiled for plans."""
    found: list[Engine] = []
    plan = OperationGraph.plan

    def watched(self: OperationGraph, engine: Engine, *knobs: Any) -> Any:
        made = plan(self, engine, *knobs)
        if Behavior.RUNTIME_COMPILATION in engine.behavior:
            found.append(engine)
        return made

    monkeypatch.setattr(OperationGraph, "plan", watched)
    return found


def problem(direction: Direction, samples: int = 16) -> ConvProblem:
    """A layer of 3x3."""
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    return ConvProblem.of_convolution(direction, (samples, 64, 56, 56), (64, 64, 3, 3), **geometry)


def planner(database: Path) -> Planner:
    """One with providers of its own, which keep no plans of other tests."""
    settings = Settings.from_environment({}, database=str(database), progress="off", check="off")
    return Planner(settings, Store(str(database)), providers=(Engines(Card(0)),), device=GPU)


def planned(wanted: ConvProblem, limit: float, database: Path) -> Plan:
    found = planner(database)
    return found.plan(found.measurement(wanted), limit)


@pytest.mark.parametrize("limit", [*LIMITS, float("inf")])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("direction", Direction)
def test_a_convolution_has_a_budget(
    direction: Direction, precision: str, limit: float, card: Any, compiled: list[Engine], tmp_path: Path
) -> None:
    torch.backends.cudnn.conv.fp32_precision = precision
    plans, launches = card.counted("plans"), card.counted("executed")
    planned(problem(direction), limit, tmp_path / "times.sqlite")
    assert 0 < card.counted("plans") - plans <= MOST_PLANS
    assert 0 < card.counted("executed") - launches <= MOST_LAUNCHES
    assert len(compiled) <= MOST_COMPILED


def test_naming_engines_makes_no_plan(card: Any) -> None:
    plans = card.counted("plans")
    for direction in Direction:
        assert Engines(Card(0)).algorithms(problem(direction))
    assert card.counted("plans") == plans


@pytest.mark.parametrize("direction", Direction)
def test_a_second_run_makes_no_plan_but_those_that_it_uses(direction: Direction, card: Any, tmp_path: Path) -> None:
    database = tmp_path / "times.sqlite"
    first = planned(problem(direction), LIMITS[1], database)
    plans, launches = card.counted("plans"), card.counted("executed")
    again = planned(problem(direction), LIMITS[1], database)
    assert card.counted("plans") == plans and card.counted("executed") == launches
    assert again.division == first.division


def test_a_compiled_plan_is_restored_and_computes_the_same(
    card: Any, compiled: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULL_CARD_CONVOLUTIONS", "1")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    restored = card.counted("restored")
    x, w = (torch.randn(shape, dtype=torch.float64).float().to(GPU) for shape in ((2, 64, 56, 56), (64, 64, 3, 3)))
    small = ConvProblem.of_convolution(
        Direction.FORWARD, tuple(x.shape), tuple(w.shape), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    needs, results = [], []
    for _ in range(2):
        engines = Engines(Card(0))
        engines.archive = CompiledPlans(Store(str(tmp_path / "times.sqlite")), device_of(GPU))
        needs.append(engines.workspace(small, COMPILED))
        y = torch.empty_like(x)
        division = Division((Option(1, COMPILED, 0.0, 0),) * 2)
        Schedule(small, division, {COMPILED: engines}).run(Operands(x, w, y))
        results.append(y.cpu())
    assert len(compiled) == 2  # of one sample and of two, in the first run
    assert card.counted("restored") == restored + 2
    assert needs[0] == needs[1]
    expected = torch.nn.functional.conv2d(x.cpu().double(), w.cpu().double(), padding=1)
    assert all((result - expected).abs().max() < 1e-3 for result in results)


def test_an_engine_is_compiled_once_for_all_mini_batches() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    engines, seconds = Engines(Card(0)), []
    for samples in (16, 8, 4, 1):
        began = time.process_time()
        engines.workspace(problem(Direction.FORWARD, samples), COMPILED)
        seconds.append(time.process_time() - began)
    assert sum(seconds[1:]) < seconds[0] / 4, seconds


@pytest.mark.parametrize("limit", [*LIMITS, float("inf")])
@pytest.mark.parametrize("direction", Direction)
def test_no_launch_needs_more_than_was_promised(direction: Direction, limit: float, tmp_path: Path) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    found = planner(tmp_path / "times.sqlite")
    measurement = found.measurement(problem(direction))
    plan = found.plan(measurement, limit)
    providers = found.offers.providers(plan.problem)
    for dim, options in plan.options.items():
        for option in options:
            candidate = providers[option.algorithm], option.algorithm
            asked = planner(tmp_path / "other.sqlite").measurement(plan.problem)
            need = asked.workspace(candidate, dim, option.extent)
            assert need is not None and need <= option.workspace <= limit


@pytest.mark.parametrize("direction", Direction)
def test_what_was_measured_with_is_freed_with_the_plan(direction: Direction, tmp_path: Path) -> None:
    """Not only when Python collects its garbage: by then the next layers have asked for memory, too."""
    found = planner(tmp_path / "times.sqlite")
    asked = problem(direction)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        found.plan(found.measurement(asked, synthetic_operands(asked, GPU)), LIMITS[1])
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()
