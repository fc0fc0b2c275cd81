"""The scratch memory of torch's own kernels within the limit: what they hold, what is chosen, and what is refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import problems
from references import operands
from tensor_memory import TensorMemory
from test_layout import grouped, image, in_format

import mucudnn
from mucudnn.convolution.call import Call, Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import tiles
from mucudnn.devices import speeds
from mucudnn.optimizer import Trial, playoff
from mucudnn.planning.outline import may_exceed, outline
from mucudnn.planning.planner import counted, scratch
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import HOST_PROVIDERS, Provider
from mucudnn.providers.onednn_copies import copies_bytes
from mucudnn.providers.slices import SLICES
from mucudnn.providers.stock import columns_bytes, stock_call, torchs_backend
from mucudnn.reporting.tables import summary
from mucudnn.settings import SettingError, Settings
from mucudnn.timing.schedule import LaunchError

PROVIDERS = [counted(provider, scratch) for provider in HOST_PROVIDERS]
SLACK = 512
"""Bytes by which the profiler may count more: torch rounds each allocation up to 64."""

X, W = (4, 8, 24, 24), (8, 8, 5, 5)


def convolved() -> torch.Tensor:
    """By a kernel of torch's own that writes out columns: one tap of every input for each of 25 outputs."""
    return torch.nn.functional.conv2d(torch.ones(X, dtype=torch.float64), torch.ones(W, dtype=torch.float64), padding=2)


COLUMNS = 4 * 8 * 25 * 24 * 24 * 8


def held_at_most(problem: ConvProblem, provider: Provider, algorithm: str, extents: list[int]) -> None:
    tensors = in_format(operands(problem), problem.formats[0]) if problem.dims > 1 else operands(problem)
    parts = [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, extents)]
    with TensorMemory() as memory:
        provider.launch(algorithm, parts, accumulate=False)
    declared = max(provider.workspace(part.problem, algorithm) for part in parts)
    assert memory.peak <= declared + SLACK


@pytest.mark.usefixtures("collected_once")
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_torchs_kernels_hold_is_declared(data: st.DataObject) -> None:
    drawn = data.draw(problems(dtypes=("float64",), max_extent=4))
    name = data.draw(st.sampled_from(("contiguous", "channels_last"))) if drawn.dims > 1 else "contiguous"
    problem = replace(drawn, formats=(name,) * 3)
    offered = [
        (one, name) for one in PROVIDERS for name in one.algorithms(problem) if "stock" in name or name == SLICES
    ]
    assume(offered)
    size = data.draw(st.integers(1, problem.extent))
    extents = [size] * (problem.extent // size) + [problem.extent % size] * bool(problem.extent % size)
    held_at_most(problem, *data.draw(st.sampled_from(offered)), extents)


@pytest.mark.usefixtures("collected_once")
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["5x5, depthwise", "3x3x3, depthwise", "3x3, 8 groups"])
def test_what_onednn_holds_is_declared(name: str, direction: Direction) -> None:
    problem = grouped(name, direction)
    for provider in PROVIDERS:
        for algorithm in provider.algorithms(problem):
            if "stock" in algorithm:
                held_at_most(problem, provider, algorithm, [2, 1])


def test_columns_are_scratch() -> None:
    one = ConvProblem.of_convolution(
        Direction.FORWARD, X, W, stride=(1, 1), padding=(2, 2), dilation=(1, 1), dtype="float64"
    )
    assert COLUMNS <= scratch(one) <= 1.1 * COLUMNS
    assert scratch(image(dtype="float64", padding=(0, 0), stride=(1, 1)).with_extent(1)) > 0


@pytest.mark.parametrize("share", [1.2, 0.5, 0.1])
def test_a_limit_is_a_promise(share: float) -> None:
    limit = int(share * COLUMNS)
    with mucudnn.patched(workspace_limit=limit, count_stock=True, database=":memory:", progress="off"):
        right = convolved()
        (record,) = mucudnn.report()
        with TensorMemory() as memory:
            found = convolved()
    torch.testing.assert_close(found, right)
    given = 8 * (2 * math.prod(X) + math.prod(W))
    assert memory.peak <= limit + given + SLACK
    assert record.stock_workspace is not None and record.stock_workspace >= COLUMNS
    assert record.workspace <= limit
    if share < 1:
        assert record.parts != ((4, "stock"),)


def test_only_columns_count_unless_it_is_asked_for() -> None:
    with mucudnn.patched(workspace_limit=1, planning="ahead", database=":memory:", progress="off"):
        torch.nn.functional.conv2d(torch.ones(X), torch.ones(W), padding=2)
        (record,) = mucudnn.report()
    assert (record.parts, record.workspace, record.stock_workspace) == (((4, "stock"),), 0, None)
    assert "for themselves" not in summary([record])


def _one_contender_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The playoff has one round, in which all contenders but the first fail: so it is settled within such a call."""
    own = TrialRunner.run

    def failing(runner: TrialRunner, trial: Trial, operands: Operands) -> Any:
        if trial.place > 0:
            raise LaunchError(trial.keys[0][1], 100, RuntimeError("no memory"))
        return own(runner, trial, operands)

    monkeypatch.setattr(TrialRunner, "run", failing)
    monkeypatch.setattr(playoff, "ROUNDS", 1)
    monkeypatch.setattr(speeds, "_now", lambda kind: 1e7)  # so all divisions are contenders


@pytest.mark.parametrize("planning", ["ahead", "live", "live, a contender fails"])
def test_what_needs_less_wins_where_columns_exceed_the_limit(planning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first call on, torch's own kernel computes at most parts."""
    monkeypatch.setattr(speeds, "_now", lambda kind: 1e10)  # measuring them takes memory, too
    planning, _, fails = planning.partition(", ")
    if fails:
        _one_contender_fails(monkeypatch)
    limit, expected = COLUMNS // 3, convolved()
    with mucudnn.patched(workspace_limit=limit, planning=planning, database=":memory:", progress="off"):
        with TensorMemory() as memory:
            found = [convolved() for _ in range(10)]
        assert memory.peak <= limit + (len(found) + 3) * expected.nbytes
        for result in (*found, *(convolved() for _ in range(30))):
            torch.testing.assert_close(result, expected)
        (record,) = mucudnn.report()
        told = summary([record])
    assert record.workspace <= limit < record.stock_workspace and record.is_stock_assumed
    assert record.parts != ((4, "stock"),)
    assert "no time of it is known" in told and "the speed of torch's own kernels" not in told


PLAIN = {
    "2-D": ((6, 4, 20, 22), (5, 4, 3, 3), {}),
    "2-D, depthwise": ((6, 4, 20, 22), (4, 1, 5, 5), {"groups": 4, "padding": (2, 2)}),
    "2-D, two groups": ((6, 4, 20, 22), (6, 2, 3, 3), {"groups": 2}),
    "2-D, 1x1": ((6, 4, 20, 22), (5, 4, 1, 1), {}),
    "2-D, dilated": ((6, 4, 20, 22), (5, 4, 3, 3), {"dilation": (2, 2)}),
    "2-D, transposed": ((6, 4, 10, 11), (4, 5, 3, 3), {"transposed": True, "stride": (2, 2)}),
    "1-D": ((6, 4, 200), (5, 4, 9), {}),
    "3-D": ((6, 4, 8, 9, 10), (5, 4, 3, 3, 3), {}),
    "3-D, depthwise": ((6, 4, 8, 9, 10), (4, 1, 3, 3, 3), {"groups": 4}),
    "3-D, dilated": ((6, 4, 8, 9, 10), (5, 4, 3, 3, 3), {"dilation": (2, 2, 2)}),
    "3-D, transposed": ((6, 4, 5, 6, 7), (4, 5, 3, 3, 3), {"transposed": True, "stride": (2, 2, 2)}),
}


def plain(name: str, direction: Direction) -> ConvProblem:
    input_shape, weight_shape, changes = PLAIN[name]
    ones = (1,) * (len(input_shape) - 2)
    usual: dict[str, Any] = {"stride": ones, "padding": (0,) * len(ones), "dilation": ones, "dtype": "float64"}
    return ConvProblem.of_convolution(direction, input_shape, weight_shape, **usual | changes)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", PLAIN)
def test_columns_are_known_by_a_formula(name: str, direction: Direction) -> None:
    problem = plain(name, direction)
    held, columns = scratch(problem), columns_bytes(problem)
    copies = 8 * (math.prod(problem.x_shape) + math.prod(problem.y_shape)) if problem.groups > 1 else 0
    if torchs_backend(problem) == "Slow2d" and problem.target is Role.X:
        copies += columns  # from the system, not from torch's allocator
    assert held <= columns + SLACK and columns <= held + copies


COPIED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2d": ((1, 32, 96, 96), (32, 32, 3, 3), {"padding": (1, 1)}),
    "2d, 24 channels": ((1, 24, 96, 96), (24, 24, 3, 3), {"padding": (1, 1)}),
    "2d, few channels": ((1, 8, 96, 96), (24, 8, 3, 3), {"padding": (1, 1)}),
    "2d, to one channel": ((1, 32, 96, 96), (1, 32, 3, 3), {"padding": (1, 1)}),
    "2d, strided": ((1, 32, 128, 128), (32, 32, 3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "2d, 1x1": ((1, 32, 128, 128), (32, 32, 1, 1), {}),
    "2d, 1x1, strided": ((1, 32, 128, 128), (64, 32, 1, 1), {"stride": (2, 2)}),
    "2d, far": ((2, 64, 64, 64), (64, 64, 3, 3), {"padding": (12, 12), "dilation": (12, 12)}),
    "2d, far beyond": ((2, 512, 32, 32), (512, 512, 3, 3), {"padding": (24, 24), "dilation": (24, 24)}),
    "2d, transposed": ((2, 32, 64, 64), (32, 16, 4, 4), {"stride": (2, 2), "transposed": True}),
    "3d": ((2, 16, 32, 32, 32), (16, 16, 3, 3, 3), {"padding": (1, 1, 1)}),
    "3d, few positions": ((2, 192, 8, 8, 8), (192, 192, 3, 3, 3), {"padding": (1, 1, 1)}),
}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", COPIED)
def test_copies_in_other_layouts_are_known_by_a_formula(name: str, direction: Direction) -> None:
    input_shape, weight_shape, changes = COPIED[name]
    ones = (1,) * (len(input_shape) - 2)
    usual: dict[str, Any] = {"stride": ones, "padding": (0,) * len(ones), "dilation": ones, "dtype": "float32"}
    problem = ConvProblem.of_convolution(direction, input_shape, weight_shape, **usual | changes)
    held, copies = scratch(problem), copies_bytes(problem)
    assert held <= 1.05 * copies
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # elsewhere kernels may need none
        most = {"3d": 4, "2d, far": 8, "2d, far beyond": 8 if direction is Direction.FORWARD else 1.5}
        assert copies <= most.get(name, 2) * held


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", PLAIN)
def test_the_layout_of_results_is_known_without_columns(name: str, direction: Direction) -> None:
    problem, given = plain(name, direction), operands(plain(name, direction))
    x, w, y = (each.repeat_interleave(2, -1)[..., ::2] for each in (given.x, given.w, given.y))
    strided = replace(given, x=x, w=w[:1].expand_as(w), y=y)
    formats = [in_format(given, name) for name in ("contiguous", "channels_last")] if problem.dims > 1 else [given]
    for tensors in (*formats, strided):
        source, produced = (tensors.y, tensors.x) if problem.transposed else (tensors.x, tensors.y)
        gradient = None if direction is Direction.FORWARD else produced
        call = Call(direction, source, tensors.w, None, gradient, *problem.arguments)
        found, right = outline(call), stock_call(call)
        assert found is not None and (found.shape, found.stride()) == (right.shape, right.stride())
        looks = *sum(((t.shape, t.stride(), t.dtype) for t in (source, tensors.w)), ()), problem.arguments, (), False
        assert may_exceed(looks, columns_bytes(call.problem(right)) - 1), "no columns are overlooked"
    assert not may_exceed(looks, 1e9)


def test_what_nothing_fits_is_reported_and_computed() -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"forward of 4x8x24x24 .* takes .* nothing fits 1 B"),
        mucudnn.patched(workspace_limit=1, count_stock=True, database=":memory:", progress="off"),
    ):
        found = convolved()
        (record,) = mucudnn.report()
    torch.testing.assert_close(found, convolved())
    assert record.workspace == record.stock_workspace
    assert "1 of them exceeds the limit" in summary([record])


def test_under_a_profiler_it_waits() -> None:
    with mucudnn.patched(count_stock=True, database=":memory:", progress="off"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            convolved()
        assert mucudnn.report() == []
        convolved()
        (record,) = mucudnn.report()
    assert record.stock_workspace is not None


@pytest.mark.parametrize(
    "beside",
    [
        {"total_workspace_size": "1GiB"},
        {"workspace_limit": "peak"},
        {"memory_limit": "1GiB"},
        {"planning": "live"},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_other_limits_are_refused_in_a_line(beside: dict[str, Any]) -> None:
    (name,) = beside
    with pytest.raises(SettingError, match=f"^count_stock=on and {name}=.*: accepted beside it") as caught:
        Settings.from_environment({"MUCUDNN_COUNT_STOCK": "1"}, **beside)
    assert "\n" not in str(caught.value)


def test_it_is_planned_ahead() -> None:
    assert Settings.from_environment({"MUCUDNN_COUNT_STOCK": "1"}).planning == "ahead"
    assert Settings.from_environment({}).planning == "auto"


def test_times_are_kept_apart() -> None:
    """The database keeps workspaces beside times: these are others."""
    from mucudnn.planning.planner import Planner
    from mucudnn.timing.store import Store

    store = Store(":memory:")
    keys = [
        Planner(Settings.from_environment({}, count_stock=counts), store).measurement(image()).logbook.key(image())
        for counts in (False, True)
    ]
    assert keys[0] != keys[1]
