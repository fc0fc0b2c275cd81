"""The key of a convolution: shapes, roles and words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from problems import problems
from references import apply, operands

from mucudnn.convolution.problem import ConvProblem, Direction, Role


@settings(max_examples=100)
@given(problems())
def test_output_shape_is_torchs(problem: ConvProblem) -> None:
    tensors = operands(problem)
    source = tensors.y if problem.transposed else tensors.x
    assert apply(problem, source, tensors.w, None).shape == problem.output_shape


@settings(max_examples=50)
@given(problems())
def test_extent_is_the_only_thing_a_launch_key_forgets(problem: ConvProblem) -> None:
    larger = problem.with_extent(problem.extent + 3)
    assert larger.extent == problem.extent + 3
    assert larger != problem
    assert larger.launch_key() == problem.launch_key()
    assert larger.with_extent(problem.extent) == problem


@pytest.mark.parametrize("transposed", [False, True])
def test_roles(transposed: bool) -> None:
    targets = {
        direction: ConvProblem.of_convolution(
            direction, (2, 4, 9), (4, 4, 3), stride=(1,), padding=(0,), dilation=(1,), transposed=transposed
        ).target
        for direction in Direction
    }
    output, source = (Role.X, Role.Y) if transposed else (Role.Y, Role.X)
    assert targets == {
        Direction.FORWARD: output,
        Direction.BACKWARD_DATA: source,
        Direction.BACKWARD_FILTER: Role.W,
    }


PLAIN = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}


@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "changes"),
    [
        ((2, 3, 5, 5), (4, 2, 3, 3), {}),
        ((2, 3, 5, 5), (4, 3, 3), {}),
        ((2, 3, 5, 5), (4, 3, 7, 3), {}),
        ((0, 3, 5, 5), (4, 3, 3, 3), {}),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"stride": (0, 1)}),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"padding": (-1, 1)}),
        ((2, 3, 5, 5), (4, 3, 3, 3), {"dilation": (1,)}),
        ((2, 4, 5, 5), (3, 2, 3, 3), {"groups": 2}),
    ],
    ids=["channels", "dims", "kernel", "empty", "stride", "padding", "dilation", "groups"],
)
def test_what_is_no_convolution_is_refused(input_shape, weight_shape, changes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="input"):
        ConvProblem.of_convolution(Direction.FORWARD, input_shape, weight_shape, **(PLAIN | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "2x4x9x9 k6x4x3x3"),
        ({"stride": (2, 2), "padding": (1, 2)}, "2x4x9x9 k6x4x3x3 s2 p1x2"),
        ({"dtype": "bfloat16", "dilation": (2, 2)}, "2x4x9x9 k6x4x3x3 d2 bfloat16"),
        ({"formats": ("channels_last", "contiguous", "strided")}, "2x4x9x9 k6x4x3x3 x:channels_last y:strided"),
    ],
)
def test_words(changes, words) -> None:  # type: ignore[no-untyped-def]
    assert str(ConvProblem.of_convolution(Direction.FORWARD, (2, 4, 9, 9), (6, 4, 3, 3), **(PLAIN | changes))) == words
