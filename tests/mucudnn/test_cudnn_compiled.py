"""Plans that cuDNN compiled at run time are kept in the database, on a simulated cuDNN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import TOLERANCE, operands, reference, relative_error
from simulated_card import SimulatedCard

from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import extent
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Option
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.timing.logbook import CompiledPlans
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store

PROBLEM = ConvProblem.of_convolution(
    Direction.FORWARD, (4, 3, 8, 8), (5, 3, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)


class Runs:
    """Runs of a program with one database, on a card where engine 1 is compiled at run time.

    Their plans live on, since the text of a simulated plan only names what describes it.
    """

    def __init__(self, database: Path | str) -> None:
        self.database = str(database)
        self.cudnn = SimulatedCard().simulated
        self.cudnn.compiled.add(1)
        self._engines: list[Engines] = []

    def new(self) -> Engines:
        card = SimulatedCard()
        card.library = card.simulated = self.cudnn
        engines = Engines(card)
        engines.archive = CompiledPlans(Store(self.database), device_of(torch.device("cpu")))
        self._engines.append(engines)
        return engines


def compute(engines: Engines, algorithm: str) -> float:
    """The error of the convolution, in two halves."""
    half = extent(PROBLEM, Dim.BATCH) // 2
    division = Division((Option(half, algorithm, 0.0, 0),) * 2)
    given = operands(PROBLEM)
    Schedule(PROBLEM, division, {algorithm: engines}).run(given)
    return relative_error(given.y, reference(PROBLEM, given))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "times.sqlite")


def test_a_second_run_restores_what_the_first_compiled(runs: Runs) -> None:
    for _ in range(2):
        assert compute(runs.new(), "eng1") <= TOLERANCE[PROBLEM.dtype]
    assert runs.cudnn.finalized[1] == 1 and runs.cudnn.restored == 1


def test_each_extent_has_a_plan_of_its_own(runs: Runs) -> None:
    for _ in range(2):
        engines = runs.new()
        assert [engines.workspace(PROBLEM.with_extent(samples), "eng1") for samples in (1, 2)] == [1024, 2048]
    assert runs.cudnn.finalized[1] == runs.cudnn.restored == 2


def test_only_compiled_plans_are_kept(runs: Runs) -> None:
    for _ in range(2):
        compute(runs.new(), "eng0")
    assert runs.cudnn.finalized[0] == 2 and runs.cudnn.restored == 0


def test_a_text_that_cudnn_refuses_is_replaced(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    compute(runs.new(), "eng1")
    asked = CompiledPlans.compiled_plan
    with monkeypatch.context() as patched:
        patched.setattr(CompiledPlans, "compiled_plan", lambda *launch: asked(*launch) and "of another version")
        assert compute(runs.new(), "eng1") <= TOLERANCE[PROBLEM.dtype]
    assert runs.cudnn.finalized[1] == 2 and runs.cudnn.restored == 0
    compute(runs.new(), "eng1")
    assert runs.cudnn.finalized[1] == 2 and runs.cudnn.restored == 1


def test_without_a_file_nothing_is_kept() -> None:
    runs = Runs(":memory:")
    for _ in range(2):
        compute(runs.new(), "eng1")
    assert runs.cudnn.finalized[1] == 2 and runs.cudnn.restored == 0


@pytest.mark.parametrize("is_static", [False, True])
def test_an_engine_is_compiled_once_for_all_mini_batches(runs: Runs, is_static: bool) -> None:
    runs.cudnn.static |= {1} if is_static else set()
    engines = runs.new()
    found = [engines.workspace(PROBLEM.with_extent(samples), "eng1") for samples in (4, 2, 1)]
    assert found == [4096, 2048, 1024] and runs.cudnn.compilations[1] == (3 if is_static else 1)
    assert compute(engines, "eng1") <= TOLERANCE[PROBLEM.dtype]
    assert runs.cudnn.compilations[1] == (3 if is_static else 1)
    engines.workspace(replace(PROBLEM, padding=(0, 0), y_shape=(4, 5, 6, 6)), "eng1")
    assert runs.cudnn.compilations[1] == (4 if is_static else 2)
