"""Parts in strips along a second dim: exact, within what they declare, and offered only where one dim does not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import problems
from references import TOLERANCE, operands, rounding_error
from tensor_memory import TensorMemory
from test_workspace import PROVIDERS, widened

from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import divided_dims, extent
from mucudnn.optimizer import Division, Option
from mucudnn.planning.offers import WIDTHS
from mucudnn.planning.planner import Planner
from mucudnn.providers.strips import Strips, strips_of
from mucudnn.settings import Settings
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store


@pytest.mark.usefixtures("collected_once")
@pytest.mark.parametrize("algorithm", ["fft", "gemm"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_in_strips_equal_the_reference_and_keep_what_they_declare(algorithm: str, data: st.DataObject) -> None:
    problem = data.draw(problems(("float64", "float32"), max_extent=3))
    dim = data.draw(st.sampled_from(divided_dims(problem)))
    whole = extent(problem, dim)
    first = data.draw(st.integers(1, whole))
    extents = [first, *([whole - first] if first < whole else [])]
    for strips in strips_of(problem, dim, PROVIDERS[algorithm], algorithm)[:3]:
        division = Division(tuple(Option(size, strips.name, 0.0, 0) for size in extents), dim)
        schedule = Schedule(problem, division, {strips.name: strips})
        if not all(strips.serves(tile.problem, strips.name) for run in schedule._runs for tile in run.tiles):
            continue
        given = widened(problem, operands(problem))
        declared = max(schedule.workspaces())
        with TensorMemory() as memory:
            schedule.run(given)
        assert memory.peak <= declared
        assert rounding_error(problem, given) < TOLERANCE[problem.dtype]


VOLUME = ConvProblem.of_convolution(
    Direction.FORWARD, (2, 3, 12, 13, 14), (4, 3, 7, 7, 7), stride=(1,) * 3, padding=(3,) * 3, dilation=(1,) * 3
)
PICTURE = replace(VOLUME, x_shape=(2, 3, 12, 13), w_shape=(4, 3, 7, 7), y_shape=(2, 4, 12, 13), stride=(1, 1))
PICTURE = replace(PICTURE, padding=(3, 3), dilation=(1, 1), formats=("contiguous",) * 3)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("problem", [VOLUME, PICTURE], ids=["volume", "picture"])
def test_strips_are_offered_where_one_dim_does_not_reach_the_limit(problem: ConvProblem, direction: Direction) -> None:
    problem = replace(problem, direction=direction)
    planner = Planner(Settings.from_environment({}, database=":memory:"), Store(":memory:"))
    measurement = planner.measurement(problem, operands(problem))
    one = {
        (dim, name): found
        for dim in divided_dims(problem)
        for found in planner.offers.candidates(problem, dim)
        for name in found[1:]
    }
    least = {
        name: min(
            need
            for (dim, other), found in one.items()
            if other == name
            for need in [measurement.workspace(found, dim, 1)]
            if need
        )
        for _, name in one
    }
    assert planner.offers.within(measurement, least["fft"]).keys() >= one.keys()
    assert not any(name.startswith("fft@") for _, name in planner.offers.within(measurement, least["fft"]))
    offered = planner.offers.within(measurement, least["fft"] - 1)
    found = {task: candidate for task, candidate in offered.items() if task[1].startswith("fft@")}
    assert found and len(found) <= 2 * WIDTHS
    for (dim, name), candidate in found.items():
        need = measurement.workspace(candidate, dim, 1)
        assert need is not None and need < least["fft"]
        assert name in planner.offers.providers(problem), "a plan that is kept finds who serves it by the name"


def test_half_types_gradients_of_weights_are_not_cut_into_strips() -> None:
    problem = replace(VOLUME, direction=Direction.BACKWARD_FILTER, dtype="bfloat16")
    assert problem.target is Role.W
    strips = Strips(PROVIDERS["fft"], "fft", Dim.HEIGHT, 4)
    assert not strips.serves(problem, strips.name)
    assert strips.serves(replace(problem, dtype="float32"), strips.name)
