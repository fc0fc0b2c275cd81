"""Every host algorithm in every direction against stock torch in float64, and its workspace against what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems
from references import TOLERANCE, dtypes, operands, reference, relative_error

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import tiles
from mucudnn.providers import HOST_PROVIDERS
from mucudnn.providers.onednn import OneDnn

ALGORITHMS = ("stock", "onednn", "gemm", "fft", "slices")


def launch(
    problem: ConvProblem,
    algorithm: str,
    whole: Operands,
    extents: Sequence[int],
    dim: Dim = Dim.BATCH,
    accumulate: bool = False,
) -> bool:
    """Runs the algorithm if it serves all parts of the problem."""
    parts = [tile.part(whole) for tile in tiles(problem, dim, extents)]
    for provider in HOST_PROVIDERS:
        if all(algorithm in provider.algorithms(part.problem) for part in parts):
            provider.launch(algorithm, parts, accumulate)
            return True
    return False


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=150)
@given(data=st.data())
def test_algorithm_equals_float64_reference(algorithm: str, data: st.DataObject) -> None:
    problem = data.draw(problems(dtypes(algorithm, "float64", "float32", "bfloat16", "float16")))
    with_bias = problem.direction == "forward" and data.draw(st.booleans())
    tensors = operands(problem, with_bias=with_bias)
    split = data.draw(st.integers(1, problem.extent))
    extents = [size for size in (split, problem.extent - split) if size]
    if launch(problem, algorithm, tensors, extents):
        assert relative_error(tensors.target(problem), reference(problem, tensors)) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=30)
@given(data=st.data())
def test_weight_gradients_accumulate_on_request(algorithm: str, data: st.DataObject) -> None:
    dtype, tolerance = ("float32", 1e-5) if algorithm == "onednn" else ("float64", 1e-11)
    problem = data.draw(problems(dtypes=(dtype,)).filter(lambda problem: problem.target is Role.W))
    tensors = operands(problem)
    tensors.w.fill_(3.0)
    if launch(problem, algorithm, tensors, [problem.extent], accumulate=True):
        expected = 3.0 + reference(problem, tensors)
        assert relative_error(tensors.w, expected) < tolerance


def test_small_weight_gradients_are_as_exact_as_torchs() -> None:
    shapes = Direction.BACKWARD_FILTER, (6, 4, 34), (4, 4, 3)
    problem = ConvProblem.of_convolution(*shapes, stride=(1,), padding=(1,), dilation=(2,))
    errors = dict.fromkeys(("stock", "gemm"), 0.0)
    for seed in range(20):
        tensors = operands(problem, seed)
        for algorithm in errors:
            assert launch(problem, algorithm, tensors, [problem.extent])
            errors[algorithm] += relative_error(tensors.w, reference(problem, tensors))
    assert errors["gemm"] < 1.5 * errors["stock"]


SLABS = {
    "1-D": ((1, 4, 64), (6, 4, 5)),
    "2-D": ((1, 4, 16, 16), (6, 4, 3, 3)),
    "3-D": ((1, 4, 8, 8, 8), (6, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("dims", SLABS)
def test_onednn_serves_what_torch_does_not_give_it(dims: str) -> None:
    input_shape, weight_shape = SLABS[dims]
    spatial = len(input_shape) - 2
    for extent, served in ((1, True), (64, False)):
        problem = ConvProblem.of_convolution(
            Direction.FORWARD,
            (extent, *input_shape[1:]),
            weight_shape,
            stride=(1,) * spatial,
            padding=(1,) * spatial,
            dilation=(1,) * spatial,
        )
        assert OneDnn().algorithms(problem) == (("onednn",) if served else ())
        assert OneDnn().algorithms(replace(problem, dtype="float64")) == ()


def test_onednn_serves_the_data_gradient_of_a_slab_between_others() -> None:
    """Its padding reaches as far as the kernel; oneDNN's weight gradients are not to be trusted with that."""
    ones = (1, 1, 1)
    data, filter = (
        ConvProblem.of_convolution(
            direction, (1, 8, 10, 12, 20), (16, 8, 3, 3, 3), stride=ones, padding=(2, 2, 1), dilation=ones
        )
        for direction in (Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER)
    )
    assert OneDnn().algorithms(filter) == ()
    tensors = operands(data)
    assert launch(data, "onednn", tensors, [1])
    assert relative_error(tensors.x, reference(data, tensors)) < 1e-5
