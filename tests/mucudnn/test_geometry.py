"""Intervals against brute force over single positions."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mucudnn.convolution.geometry import EMPTY, Window, intersect, length

windows = st.builds(
    Window, kernel=st.integers(1, 7), stride=st.integers(1, 4), padding=st.integers(0, 6), dilation=st.integers(1, 3)
)
intervals = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair)))


def reads(window: Window, output: int) -> set[int]:
    return {output * window.stride - window.padding + window.dilation * j for j in range(window.kernel)}


@given(windows, intervals)
def test_inputs_are_the_hull_of_what_the_outputs_read(window: Window, outputs: tuple[int, int]) -> None:
    positions = set().union(*(reads(window, output) for output in range(*outputs)))
    assert window.inputs(outputs) == ((min(positions), max(positions) + 1) if positions else EMPTY)


@given(windows, intervals)
def test_readers_are_the_outputs_whose_span_meets_the_inputs(window: Window, inputs: tuple[int, int]) -> None:
    def span(output: int) -> tuple[int, int]:
        return window.inputs((output, output + 1))

    positions = [output for output in range(-40, 60) if intersect(span(output), inputs) != EMPTY]
    assert window.readers(inputs) == ((positions[0], positions[-1] + 1) if positions else EMPTY)


@given(windows, st.integers(0, 30))
def test_extents_are_those_of_torch(window: Window, extent: int) -> None:
    assume(extent + 2 * window.padding >= window.reach)
    weight = torch.ones(1, 1, window.kernel)
    arguments = (window.stride, window.padding, window.dilation)
    expected = torch.nn.functional.conv1d(torch.ones(1, 1, extent), weight, None, *arguments) if extent else None
    if expected is not None:
        assert window.outputs(extent) == expected.shape[-1]


@given(windows, intervals)
def test_a_transposed_call_makes_exactly_the_outputs(window: Window, outputs: tuple[int, int]) -> None:
    assume(length(outputs) > 0)
    local = window.transposed(outputs)
    need, (first, stop) = local.need, local.span
    assert local.padding >= 0 and local.skip >= 0
    assert need == EMPTY or (first <= need[0] and need[1] <= stop)
    made = (stop - first - 1) * window.stride + window.reach - 2 * local.padding
    # Position 0 of the call's result is this output of the whole:
    origin = first * window.stride - window.padding + local.padding
    assert origin + local.skip == outputs[0]
    assert local.skip + length(outputs) <= made
    touched = {i for i in range(-40, 60) if reads(window, i) & set(range(*outputs))}
    assert touched <= set(range(*need))
