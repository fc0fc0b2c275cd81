"""Micro-tiles: every algorithm on parts along space against stock torch in float64, and the memory it holds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from forced import divided, forced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_cases import LAYERS, assert_same, results
from problems import problems
from references import TOLERANCE, dtypes, operands, relative_error, rounding_error
from tensor_memory import TensorMemory
from test_providers import ALGORITHMS, launch
from test_workspace import PROVIDERS, widened

import mucudnn
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import divided_dims, extent, is_divisible, tile, tiles
from mucudnn.convolution.tile import problems as problems_of_parts
from mucudnn.planning.planner import Planner
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import STOCK, Provider, stock
from mucudnn.providers.slices import SLICES, Slices
from mucudnn.providers.stock import Stock
from mucudnn.settings import Settings
from mucudnn.timing import clock
from mucudnn.timing.logbook import Environment
from mucudnn.timing.store import Store


def tiled(problem: ConvProblem) -> bool:
    return len(divided_dims(problem)) == 2


@st.composite
def sizes(draw: st.DrawFn, problem: ConvProblem) -> list[int]:
    """Sizes of tiles that make up the whole."""
    left, found = extent(problem, problem.spatial_dims[0]), []
    while left:
        found.append(draw(st.integers(1, left)))
        left -= found[-1]
    return found


@settings(max_examples=150)
@given(data=st.data())
def test_tiles_cover_the_target_and_read_what_it_needs(data: st.DataObject) -> None:
    problem = data.draw(problems().filter(tiled))
    cut = list(tiles(problem, problem.spatial_dims[0], data.draw(sizes(problem))))
    intervals = [part.x if problem.target is Role.X else part.y for part in cut]
    assert [start for start, _ in intervals] == [0, *(stop for _, stop in intervals[:-1])]
    assert intervals[-1][1] == extent(problem, problem.spatial_dims[0])
    # Plans of many parts keep one problem for those that are equal.
    assert len({id(part.problem) for part in cut}) == len({part.problem for part in cut})
    window = problem.windows[0]
    for part in cut:
        assert min(part.problem.padding) >= 0
        # A tile's element meets the same weight as the whole's.
        assert part.x[0] + problem.padding[0] - part.y[0] * window.stride == part.problem.padding[0]
        assert part.problem.x_shape[2] == part.x[1] - part.x[0] > 0
        assert part.problem.y_shape[2] == part.y[1] - part.y[0] > 0
        for output in range(*part.y) if problem.target is not Role.X else ():
            start, stop = window.inputs((output, output + 1))
            assert part.x[0] <= max(start, 0) and min(stop, problem.x_shape[2]) <= part.x[1]
        for row in range(*part.x) if problem.target is Role.X else ():
            first, last = window.readers((row, row + 1))
            assert first >= last or (part.y[0] <= max(first, 0) and min(last, problem.y_shape[2]) <= part.y[1])


@settings(max_examples=300)
@given(data=st.data())
def test_problems_of_parts_are_counted_as_if_each_were_made(data: st.DataObject) -> None:
    problem = data.draw(problems(("float64", "float32", "bfloat16")))
    more = data.draw(st.tuples(*[st.integers(0, 60)] * problem.dims))
    longer = [tuple(n + k * s for n, k, s in zip(problem.x_shape[2:], more, problem.stride, strict=True))]
    longer += [tuple(n + k for n, k in zip(problem.y_shape[2:], more, strict=True))]
    x_shape, y_shape = (
        shape[:2] + rest for shape, rest in zip((problem.x_shape, problem.y_shape), longer, strict=True)
    )
    layout = data.draw(st.sampled_from(["contiguous", "channels_last", "strided"]))
    problem = replace(problem, x_shape=x_shape, y_shape=y_shape, formats=(layout, "contiguous", layout))
    dim = data.draw(st.sampled_from([dim for dim in problem.spatial_dims if is_divisible(problem, dim)] or [None]))
    if dim is None:
        return
    whole = extent(problem, dim)
    size = data.draw(st.integers(1, whole))
    cut = [size] * (whole // size) + [whole % size] * (whole % size > 0)
    assert problems_of_parts(problem, dim, cut) == Counter(part.problem for part in tiles(problem, dim, cut))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=80)
@given(data=st.data())
def test_algorithm_on_tiles_equals_float64_reference(algorithm: str, data: st.DataObject) -> None:
    types = dtypes(algorithm, "float64", "float32", "bfloat16")
    problem = data.draw(problems(types, max_extent=2).filter(tiled))
    with_bias = problem.direction == "forward" and data.draw(st.booleans())
    whole = operands(problem, with_bias=with_bias)
    if launch(problem, algorithm, whole, data.draw(sizes(problem)), problem.spatial_dims[0]):
        # bfloat16 sums of stock's and of half types' parts round per part: only the schedule adds in float32.
        rounds = problem.target is Role.W and problem.dtype == "bfloat16"
        tolerance = 4 * TOLERANCE[problem.dtype] if rounds else TOLERANCE[problem.dtype]
        assert rounding_error(problem, whole) < tolerance


@pytest.mark.usefixtures("collected_once")
@pytest.mark.parametrize("algorithm", (STOCK, *PROVIDERS))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_peak_of_a_tile_stays_within_what_is_declared(algorithm: str, data: st.DataObject) -> None:
    types = dtypes(algorithm, "float32", "float64", "bfloat16")
    problem = data.draw(problems(types, max_extent=3).filter(tiled))
    provider = {STOCK: Stock(), **PROVIDERS}[algorithm]
    whole, chosen = widened(problem, operands(problem)), data.draw(sizes(problem))
    cut = list(tiles(problem, problem.spatial_dims[0], chosen))
    declared = max(provider.workspace(part.problem, algorithm) for part in cut)
    # What torch's own kernel holds inside is its own affair.
    with patch.object(stock, "stock_result", bare_result), TensorMemory() as memory:
        launch(problem, algorithm, whole, chosen, problem.spatial_dims[0])
    assert memory.peak <= declared


def bare_result(problem: ConvProblem, given: Operands) -> torch.Tensor:
    return given.w.new_zeros(problem.target_shape)


@pytest.mark.parametrize("algorithm", ("stock", "gemm", "fft"))
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_in_tiles(kind: str, algorithm: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    expected = results(module, x)
    with forced(algorithm, spatial=True):
        assert_same(results(module, x), expected)
        spatial = [record for record in mucudnn.report() if record.dim != "batch"]
        assert len(spatial) == (0 if kind == "over-padded" else 3)
        assert divided() >= len(spatial)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("direction", Direction)
def test_one_volume_stays_within_the_limit(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own kernel made to look slow, a mini-batch of one is cut along depth, by slices as by the others.

    What oneDNN's kernels for the images of slices hold inside is torch's own affair, so that it is off here.
    """
    monkeypatch.setattr("mucudnn.timing.measurement.Measurement.stock_seconds", lambda self: 1e3)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    problem = ConvProblem.of_convolution(
        direction, (1, 4, 32, 12, 12), (4, 4, 5, 5, 5), stride=(1, 1, 1), padding=(2, 2, 2), dilation=(1, 1, 1)
    )
    whole = min(provider.workspace(problem, name) for name, provider in {**PROVIDERS, SLICES: Slices()}.items())
    limit = whole // 3
    torch.manual_seed(0)
    x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape)
    y = torch.ops.aten.convolution(x, w, None, (1,) * 3, (2,) * 3, (1,) * 3, False, (0,) * 3, 1)
    mask = [direction is Direction.BACKWARD_DATA, direction is Direction.BACKWARD_FILTER, False]

    def call() -> torch.Tensor:
        geometry = ((1,) * 3, (2,) * 3, (1,) * 3, False, (0,) * 3, 1)
        if direction is Direction.FORWARD:
            return torch.ops.aten.convolution(x, w, None, *geometry)
        gradients = torch.ops.aten.convolution_backward(y, x, w, None, *geometry, mask)
        return next(gradient for gradient in gradients if gradient is not None)

    expected = call()
    with torch.backends.mkldnn.flags(enabled=False), mucudnn.patched(workspace_limit=limit, database=":memory:"):
        call()
        (record,) = mucudnn.report()
        with TensorMemory() as memory:
            result = call()
    assert record.dim == "depth" and record.is_divided and record.workspace <= limit
    assert record.division.startswith("depth ")
    assert memory.peak <= limit + math.prod(result.shape) * 4
    assert relative_error(result, expected) < 1e-5


class Rows(Provider):
    """A provider of one algorithm that takes time and memory by the rows that it reads."""

    def __init__(self) -> None:
        self.clock = 0.0

    def algorithms(self, problem: ConvProblem) -> list[str]:
        return ["rows"]

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        return problem.extent * problem.x_shape[2]

    def launch(self, algorithm, parts, accumulate) -> None:  # type: ignore[no-untyped-def]
        self.clock += sum(1e-3 * part.problem.extent * (4 + part.problem.x_shape[2]) for part in parts)


@pytest.mark.parametrize(
    ("samples", "limit", "dim", "largest"),
    [
        (4, 4 * 32, Dim.BATCH, 4),
        (4, 32, Dim.BATCH, 1),
        (4, 31, Dim.HEIGHT, 5),
        (1, 31, Dim.HEIGHT, 16),
        (1, 12, Dim.HEIGHT, 8),
    ],
)
def test_the_faster_dim_is_taken(
    samples: int, limit: int, dim: Dim, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the mini-batch nothing overlaps; along space less fits."""
    rows = Rows()

    def elapsed(work: clock.Work, *others: object) -> float:
        before = rows.clock
        work()
        return rows.clock - before or 10.0

    for name in ("first_seconds", "again_seconds", "seconds"):
        monkeypatch.setattr(clock, name, elapsed)
    monkeypatch.setattr(TrialRunner, "laps", lambda runner, trial, given: [10.0 if trial.division is None else 5.0])
    problem = ConvProblem.of_convolution(
        Direction.FORWARD, (samples, 1, 32, 4), (1, 1, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    chosen = Settings.from_environment({}, workspace_limit=limit, database=":memory:", check="off")
    store = Store(":memory:")
    planner = Planner(chosen, store, (rows,))
    plan = planner.plan(planner.measurement(problem))
    assert plan.division.dim == dim
    assert max(option.extent for option in plan.division.options) == largest
    assert plan.division.workspace <= limit
    # A tile's time is kept under the tile's own problem.
    middle = tile(problem, Dim.HEIGHT, 8, 16).problem
    known = store.launches({**middle.launch_key(), **Environment.current(torch.device("cpu")).launch_key()})
    assert (("rows", samples) in known) == (dim is Dim.HEIGHT and 18 * samples <= limit)


def test_padding_beyond_the_kernel_leaves_space_whole() -> None:
    problem = ConvProblem.of_convolution(
        Direction.FORWARD, (2, 1, 8), (1, 1, 3), stride=(1,), padding=(3,), dilation=(1,)
    )
    assert divided_dims(problem) == (Dim.BATCH,)
