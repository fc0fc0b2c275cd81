"""How few plans planning makes on a GPU, on a simulated cuDNN: names, the cost model, workspaces, the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from references import operands
from simulated_card import SimulatedCard

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.devices import Gpu
from mucudnn.optimizer import Trial
from mucudnn.planning.offers import AffordableParts, PlanBudget
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import STOCK
from mucudnn.providers.cudnn.allowed import FIRST, MOST_COMPILED, MOST_PROPOSALS, Proposal, offered, ranked
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.graph import Configuration
from mucudnn.providers.stock import Stock
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing import clock
from mucudnn.timing.logbook import Environment, Logbook
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.store import Store

GPU = torch.device("cuda", 0)
ENVIRONMENT = Environment("test", threads=1, deterministic=False, precision="", libraries="")
PLAIN = ConvProblem.of_convolution(
    Direction.FORWARD, (64, 2, 5, 5), (2, 2, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)
FAST, SLOW = 1e-3, 1e3
MOST_PLANS = 40


class Recording(Engines):
    """
    Attributes:
        asked: samples of the parts whose workspaces were asked for, by algorithm.
    """

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__(card)
        self.asked: dict[str, list[int]] = {}

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        self.asked.setdefault(algorithm, []).append(problem.extent)
        return super().workspace(problem, algorithm)


class Machine:
    """A GPU whose engines take made-up times; torch's own kernel takes a second.

    Attributes:
        fast: the engines that take `FAST` seconds for any part; others take `SLOW` ones.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str = "powerOfTwo") -> None:
        self.card, self.fast = SimulatedCard(), set[str]()
        self.engines = Recording(self.card)
        self._store = Store(MEMORY)
        settings = Settings.from_environment({}, policy=policy, database=MEMORY, check="off", progress="off")
        self.planner = Planner(settings, self._store, providers=(Stock(), self.engines), device=GPU)

        def seconds(work: clock.Work, *others: object) -> float:
            before = len(self.card.simulated.executed)
            work()
            return FAST if self.fast.intersection(self.card.simulated.executed[before:]) else SLOW

        for name in ("first_seconds", "again_seconds"):
            monkeypatch.setattr(clock, name, seconds)

        def laps(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
            if trial.division is None:
                return [1.0]
            return [seconds(lambda: runner.run(trial, given))]

        monkeypatch.setattr(Gpu, "stopwatch", lambda gpu: Mock())
        monkeypatch.setattr(TrialRunner, "laps", laps)
        monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1.0)
        monkeypatch.setattr(Gpu, "memory", 2**40)
        monkeypatch.setattr(Gpu, "cache", 0)

    def measurement(self, problem: ConvProblem) -> Measurement:
        return Measurement(problem, Logbook(ENVIRONMENT, self._store), operands(problem), device=GPU)

    def planned(self, problem: ConvProblem = PLAIN, limit: float = 2**20) -> Plan:
        return self.planner.plan(self.measurement(problem), limit)

    @property
    def plans(self) -> int:
        return self.card.simulated.finalized.total()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def sized(side: int, direction: Direction = Direction.FORWARD) -> ConvProblem:
    return replace(PLAIN, direction=direction, x_shape=(64, 2, side, side), y_shape=(64, 2, side, side))


# Names


def test_naming_makes_no_plan(machine: Machine) -> None:
    assert machine.engines.algorithms(PLAIN) == ("eng1", "eng2", "eng3", "eng0")
    assert machine.planner.offers.providers(PLAIN).keys() >= {STOCK, "eng1", "eng0"}
    assert machine.plans == 0


def proposals(*engines: int, compiled: Sequence[int] = ()) -> list[Proposal]:
    """Each with a knob of its own."""
    return [Proposal(Configuration(e, ((2, n),)), e in compiled) for n, e in enumerate(engines)]


def test_the_best_ranked_are_offered() -> None:
    lists = proposals(*range(20)), proposals(*range(100, 120))
    found, reasons = offered(ranked(lists))
    assert [one.configuration.engine for one in found] == [0, 100, 1, 101, 2, 102, 3, 103, 4, 104]
    assert len(found) == MOST_PROPOSALS and len(reasons) == 30


def test_what_differs_in_knobs_only_comes_first_or_not_at_all() -> None:
    found, _ = offered(ranked([proposals(7, 7, 7, 7, 7, 8, 7, 9)]))
    assert [one.configuration.engine for one in found] == [7] * FIRST + [8, 9]


def test_what_may_not_be_offered_takes_nobodys_place() -> None:
    refused = [one._replace(reason="it computes in TF32") for one in proposals(*[7] * 12)]
    found, reasons = offered(ranked([[*refused, *proposals(8, 8, 9)]]))
    assert [one.configuration.engine for one in found] == [8, 8, 9]
    assert set(reasons.values()) == {"it computes in TF32"}


def test_few_engines_that_are_compiled_are_offered() -> None:
    found, reasons = offered(ranked([proposals(1, 2, 3, 4, 5, compiled=(1, 2, 4))]))
    assert [one.configuration.engine for one in found] == [1, 2, 3, 5]
    assert sum(one.compiled for one in found) == MOST_COMPILED and "compiled" in reasons["eng4_k2=3"]


# The cost model


def test_what_the_cost_model_rules_out_gets_no_plan(machine: Machine) -> None:
    for side in (5, 6, 7, 8):
        machine.planned(sized(side))
    made = machine.plans
    assert made > 0
    machine.planned(sized(9))
    assert machine.plans == made, "all engines took a thousand seconds for four convolutions like it"


@pytest.mark.parametrize(("fast", "planned"), [({"eng1"}, 0), (set(), 1)])
def test_what_is_compiled_is_tried_only_where_nothing_else_is_faster(
    machine: Machine, fast: set[str], planned: int
) -> None:
    machine.card.simulated.compiled, machine.fast = {0}, fast
    machine.planned()
    assert machine.card.simulated.finalized[0] == planned


# Workspaces


def test_a_size_that_fits_is_found_by_few_questions(machine: Machine) -> None:
    machine.fast = {"eng1"}  # needs 1 KiB a sample
    plan = machine.planned(limit=20 * 1024)
    asked = list(dict.fromkeys(machine.engines.asked["eng1"]))
    assert asked[:3] == [64, 1, 16], "the whole, the smallest, and what is expected to be the largest that fits"
    assert asked[3:] == [] or set(asked[3:]) <= {8, 4, 2}
    assert 16 in {option.extent for option in plan.options[Dim.BATCH] if option.algorithm == "eng1"}


def test_what_fits_undivided_is_asked_for_first(machine: Machine) -> None:
    machine.planned()
    assert {sizes[0] for sizes in machine.engines.asked.values()} == {64}


@pytest.mark.parametrize("limit", [0.5 * 2**10, 20 * 2**10, 2**20, float("inf")])
def test_every_promise_was_asked_for(machine: Machine, limit: float) -> None:
    machine.fast = {"eng0", "eng1", "eng2"}
    plan = machine.planned(limit=limit)
    for options in plan.options.values():
        for option in options:
            if option.algorithm in machine.engines.asked:
                assert option.extent in machine.engines.asked[option.algorithm]
                assert option.workspace == (1024 * option.extent if option.algorithm == "eng1" else 0)


@pytest.mark.parametrize(("limit", "names"), [(1024, set()), (1023, {"eng1", "eng1@height=4"})])
def test_space_is_divided_only_where_a_sample_is_too_large(
    limit: int, names: set[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fast = {"eng1"}
    asked: list[Iterable[tuple[Dim, str]]] = []
    ask = AffordableParts._ask

    def watched(parts: AffordableParts, candidates: dict[tuple[Dim, str], Candidate]) -> None:
        asked.append(candidates)
        ask(parts, candidates)

    monkeypatch.setattr(AffordableParts, "_ask", watched)
    machine.planned(limit=limit)
    assert {name for tasks in asked[1:] for _, name in tasks} == names  # behind those along the mini-batch


# The budget


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("policy", ["powerOfTwo", "all"])
@pytest.mark.parametrize("limit", [512, 20 * 2**10, 2**20])
def test_a_problem_has_a_budget_of_plans(
    direction: Direction, policy: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, policy)
    machine.fast = {"eng0", "eng1", "eng2", "eng3"}
    machine.planned(sized(5, direction), limit)
    assert 0 < machine.plans <= MOST_PLANS


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("count", [4, 10, 60])
def test_every_engine_is_asked_for_once(direction: Direction, count: int, machine: Machine) -> None:
    made, each = 0, 2 if direction is Direction.BACKWARD_FILTER else 1
    names = [f"eng{number}" for number in range(count)]
    candidates = [*((machine.engines, name) for name in names), (Stock(), STOCK)]
    budget = PlanBudget(sized(5, direction), lambda: made, candidates)
    for name in names:
        budget.begin(name)
        assert budget.allows(Dim.BATCH)
        made += each
        while budget.allows(Dim.BATCH):
            made += each  # what else the first ones ask for
    assert made >= count * each and not budget.allows(Dim.BATCH) and budget.allows(Dim.HEIGHT)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("limit", [512, 20 * 2**10, 2**20])
def test_live_planning_has_the_same_budget(direction: Direction, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "all")
    every: Callable[[object], bool] = lambda candidate: True  # noqa: E731
    problem = sized(5, direction)
    parts = AffordableParts(machine.planner.offers, machine.measurement(problem), limit, "all", every)
    assert 0 < machine.plans <= MOST_PLANS
    assert (Dim.BATCH, STOCK) in parts.offered and (Dim.BATCH, STOCK) not in parts.fitting
    for (_, name), fitting in parts.fitting.items():
        for size, need in fitting.items():
            assert need <= limit and (size in machine.engines.asked[name] or "@" in name)
    nothing = AffordableParts(machine.planner.offers, machine.measurement(problem), limit, "all", lambda one: False)
    assert nothing.fitting == {}


def test_a_second_run_makes_no_plan_to_decide(machine: Machine) -> None:
    machine.fast = {"eng1"}
    first = machine.planned()
    made = machine.plans
    again = machine.planned()
    assert machine.plans == made
    assert again.options == first.options
