"""Results are checked before an algorithm is used: single elements, verdicts, and what a program sees of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forced import Forced
from hypothesis import given, settings
from made_up_clock import MadeUp
from problems import problems
from references import operands, reference
from test_live import eager
from torch.nn import functional

import mucudnn
from mucudnn.commands.findings import wrong_results
from mucudnn.convolution.call import Call, Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import Part
from mucudnn.convolution.verdict import exact, verdict
from mucudnn.devices import device_of, speeds
from mucudnn.optimizer import Division, Option, Trial, exploration, launches
from mucudnn.planning import trial_runner
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import HOST_PROVIDERS, STOCK, stock
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.reporting.record import Record
from mucudnn.reporting.tables import summary
from mucudnn.runtime.fixed import Fixed
from mucudnn.settings import SettingError, Settings
from mucudnn.timing.measurement import Measurement
from mucudnn.timing.schedule import LaunchError, Schedule
from mucudnn.timing.store import Store

__all__ = ["eager"]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_elements_are_those_of_the_whole(problem: ConvProblem) -> None:
    given = operands(problem, with_bias=problem.direction is Direction.FORWARD)
    whole = reference(problem, given)
    places = [tuple(n * number // 5 for n in whole.shape) for number in range(5)]
    places.append(tuple(n - 1 for n in whole.shape))
    for place, (value, size, root) in zip(places, exact(problem, given, places), strict=True):
        assert value == pytest.approx(whole[place].item(), rel=1e-10, abs=1e-10)
        assert abs(value) <= size * (1 + 1e-12) and root <= size * (1 + 1e-12)


SMALL = ConvProblem.of_convolution(
    Direction.FORWARD, (3, 2, 9, 9), (4, 2, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)


def judged(change: Any, *, against_stock: bool = True) -> Any:
    """The verdict on torch's own result with a change, which one other element does not have."""
    given = operands(SMALL)
    right = stock.stock_result(SMALL, given)
    result = right.clone()
    change(result, given)
    return verdict(SMALL, given, result, right if against_stock else None, "")


def test_one_wrong_element_anywhere_is_found_and_named() -> None:
    for number in range(40):
        place = tuple((7 * number + dim) % extent for dim, extent in enumerate(SMALL.y_shape))
        fault, torchs = judged(lambda result, given, place=place: result[place].add_(1e-3))
        assert fault is not None and fault.place == place and torchs is None
        assert "\n" not in str(fault)
    fault, torchs = judged(lambda result, given: result[1, 2, 0, :].fill_(math.nan))
    assert fault is not None and math.isnan(fault.found) and torchs is None


def test_torchs_own_result_is_reported_where_it_is_the_wrong_one() -> None:
    given = operands(SMALL)
    right = stock.stock_result(SMALL, given)
    broken = right.clone()
    broken[2, 3, 4, 5] = 7.0
    found = verdict(SMALL, given, right, broken, "")
    assert found is not None and found[0] is None
    assert found[1] is not None and found[1].place == (2, 3, 4, 5)


def test_without_another_result_a_sample_decides() -> None:
    assert judged(lambda result, given: None, against_stock=False) == (None, None)
    assert judged(lambda result, given: result.mul_(1.01), against_stock=False)[0] is not None
    assert judged(lambda result, given: result[..., -1].zero_(), against_stock=False)[0] is not None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_operands_that_are_not_finite_tell_nothing(value: float) -> None:
    assert judged(lambda result, given: given.x[0, 0, 0].fill_(value)) is None


def test_what_half_types_cannot_hold_is_no_fault() -> None:
    problem = replace(SMALL, dtype="float16")
    given = operands(problem)
    large = replace(given, x=given.x * 1e4, w=given.w * 1e2)
    result = stock.stock_result(problem, large)
    assert result.isinf().any()
    assert verdict(problem, large, result, result.clone().nan_to_num_(0.0), "") == (None, None)


def test_types_that_are_multiplied_narrower_may_be_off_by_as_much() -> None:
    given = operands(SMALL)
    narrow = replace(given, x=given.x.bfloat16().float(), w=given.w.bfloat16().float())
    result, right = stock.stock_result(SMALL, narrow), stock.stock_result(SMALL, given)
    assert verdict(SMALL, given, result, right, "fp32=none") != (None, None)
    assert verdict(SMALL, given, result, right, "fp32=bf16") == (None, None)


class Wrong:
    """Makes results of the FFT wrong, in one direction or in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *targets: Role) -> None:
        launch = Fft.launch
        self.calls = 0

        def wrong(provider: Fft, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
            launch(provider, algorithm, parts, accumulate)
            self.calls += 1
            for part in parts:
                if part.problem.target in targets:
                    part.result[..., -1] += 1

        monkeypatch.setattr(Fft, "launch", wrong)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


X, W = torch.randn(8, 3, 12, 12), torch.randn(5, 3, 5, 5)


def run(count: int = 1) -> list[Any]:
    """What a program computes: forward and both gradients."""
    for _ in range(count):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        y = functional.conv2d(x, w, padding=2)
        y.backward(torch.ones_like(y))
        found = [y.detach(), x.grad, w.grad]
        for tensor, right in zip(found, RIGHT, strict=True):
            torch.testing.assert_close(tensor, right, rtol=1e-4, atol=1e-3)
    return found


def _right() -> list[Any]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = functional.conv2d(x, w, padding=2)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, w.grad]


RIGHT = _right()


@pytest.mark.parametrize("target", list(Role))
def test_a_wrong_algorithm_is_never_used_where_plans_are_made_ahead(
    target: Role, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = Wrong(monkeypatch, target)
    path = tmp_path / "times.sqlite"
    direction = {Role.Y: "forward", Role.X: "backward_data", Role.W: "backward_filter"}[target]
    monkeypatch.setattr(Measurement, "stock_seconds", lambda measurement: 1.0)  # so that something faster is found
    monkeypatch.setattr(Gemm, "algorithms", lambda provider, problem: ())
    options: dict[str, Any] = {"database": path, "planning": "ahead"}
    with mucudnn.patched(**options), pytest.warns(RuntimeWarning, match=f"{direction} of .* fft computed") as warned:
        run(2)
        records = {record.direction: record for record in mucudnn.report()}
    assert len([one for one in warned if issubclass(one.category, RuntimeWarning)]) == 1
    for name, record in records.items():
        assert ("fft" in {algorithm for _, algorithm in record.parts}) is (name != direction)
        assert [algorithm for algorithm, _ in record.wrong] == (["fft"] if name == direction else [])
    assert f"Wrong: fft in {direction.replace('_', ' ')}" in summary(list(records.values()))
    (told,) = wrong_results(Store(str(path)))
    assert told.startswith(f"fft: {direction} of")
    before = wrong.calls
    with mucudnn.patched(**options), warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        assert {record.direction for record in mucudnn.report() if record.wrong} == {direction}
    assert wrong.calls - before > 0  # of the directions that are right, which are not judged again


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("target", list(Role))
def test_a_wrong_algorithm_is_never_used_where_plans_are_live(
    target: Role, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = Wrong(monkeypatch, target)
    # Beside other work a trial may seem too dear, or another algorithm fast enough: here everything is tried.
    monkeypatch.setattr(speeds, "operations", lambda *_: math.inf)
    monkeypatch.setattr(speeds, "writing_speed", lambda *_: math.inf)
    monkeypatch.setattr(exploration, "MOST_CALLS", math.inf)
    monkeypatch.setattr(launches, "ENOUGH", 0.0)
    path = tmp_path / "times.sqlite"
    with mucudnn.patched(database=path, planning="live"), pytest.warns(RuntimeWarning, match="fft computed"):
        run(40)
        told = [record.wrong for record in mucudnn.report() if record.wrong]
    assert [[algorithm for algorithm, _ in faults] for faults in told] == [["fft"]]
    with mucudnn.patched(database=path, planning="live", workspace_limit="1GiB"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(40)
    assert wrong.calls


def test_what_an_earlier_run_has_compared_is_not_compared_again_but_still_sampled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = Settings.from_environment({}, database=str(tmp_path / "times.sqlite"))
    compared = Mock(wraps=trial_runner.stock_result)
    monkeypatch.setattr(trial_runner, "stock_result", compared)
    given = operands(SMALL)

    def tried() -> None:
        planner = Planner(chosen, Store(chosen.database))
        runner = TrialRunner(planner.search(planner.measurement(SMALL, None, given.y.stride())))
        runner.run(Trial(Division((Option(3, "fft", 0.0, 0),))), given)

    tried()
    assert compared.call_count == 1
    tried()
    assert compared.call_count == 1
    Wrong(monkeypatch, Role.Y)
    with pytest.raises(LaunchError, match="it computed"), pytest.warns(RuntimeWarning, match="fft computed"):
        tried()
    assert compared.call_count == 1


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("later", ("right", "wrong", "failing"))
def test_a_fast_algorithm_that_was_right_computes_the_second_results(
    later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, peers, failures = TrialRunner._second_result, [], []
    machine = MadeUp(monkeypatch, fft=0.1)
    monkeypatch.setattr(trial_runner.time, "perf_counter", lambda: machine.now)

    def told(runner: TrialRunner, given: Operands) -> tuple[torch.Tensor, str]:
        peer = runner._peer
        if later == "failing" and peer is not None:
            runner._peer = Mock(run=Mock(side_effect=LaunchError("fft", 1, MemoryError())), division=peer.division)
            failures.append(peer.division.options[0].algorithm)
        result, by = second(runner, given)
        peers.append(by)
        return (result + 1 if later == "wrong" and by != STOCK else result), by

    monkeypatch.setattr(TrialRunner, "_second_result", told)
    x, w = torch.randn(4, 4, 48, 48), torch.randn(4, 4, 31, 31)
    right = functional.conv2d(x, w, padding=15)
    expected = pytest.warns(RuntimeWarning, match="fft computed") if later == "wrong" else warnings.catch_warnings()
    with mucudnn.patched(database=":memory:", planning="live"), expected:
        for _ in range(40):
            torch.testing.assert_close(functional.conv2d(x, w, padding=15), right, rtol=1e-3, atol=1e-2)
        (record,) = mucudnn.report()
    assert "fft" in (failures if later == "failing" else peers)
    assert later != "failing" or set(peers) == {STOCK}
    assert [algorithm for algorithm, _ in record.wrong] == (["fft"] if later == "wrong" else [])


@pytest.mark.usefixtures("eager")
def test_an_error_within_a_check_is_reported_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runner, "compare_results", Mock(side_effect=MemoryError("no room for a sample")))
    x, w = torch.randn(4, 4, 48, 48), torch.randn(4, 4, 31, 31)
    with mucudnn.patched(database=":memory:", planning="live"), pytest.raises(MemoryError, match="no room"):
        for _ in range(40):
            functional.conv2d(x, w, padding=15)


@pytest.mark.usefixtures("eager")
def test_without_checks_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    Wrong(monkeypatch, *Role)
    with mucudnn.patched(database=":memory:", planning="ahead", board=Forced("fft"), check="off"):
        y = functional.conv2d(X, W, padding=2)
    assert not torch.allclose(y, RIGHT[0])
    with pytest.raises(SettingError, match="on or off"):
        mucudnn.patch(check="perhaps")


def test_the_next_best_plan_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [Option(8, "gemm", 0.1, 80), Option(4, "fft", 0.2, 40), Option(4, "stock", 0.4, 4)]
    call = Call(Direction.FORWARD, X, W, None, None, (1, 1), (2, 2), (1, 1), False, (0, 0), 1)
    problem = call.problem(RIGHT[0])
    assert problem is not None
    providers = {name: provider for provider in HOST_PROVIDERS for name in provider.algorithms(problem)}
    schedule = Schedule(problem, Division((options[0],)), providers)
    record = Record(problem, "forward", math.inf, ((8, "gemm"),), 0.1, 0.1, 1.0, 80)
    plan = Plan(schedule, record, {Dim.BATCH: options}, checks=True)
    decision = Fixed(plan, RIGHT[0].stride(), device_of(X.device))
    Wrong(monkeypatch, *Role)

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Gemm, "launch", failing)
    with pytest.warns(RuntimeWarning, match="goes on with the next best plan"):
        result = decision.run(call)
    assert decision.plan.division.runs() == (("stock", (4, 4)),)
    torch.testing.assert_close(result, RIGHT[0], rtol=1e-4, atol=1e-4)
