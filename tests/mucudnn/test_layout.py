"""Algorithms on copies in another memory format: where they are offered, what they compute, and what they hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from forced import forced
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import problems
from references import TOLERANCE, operands, reference, rounding_error
from tensor_memory import TensorMemory

import mucudnn
from benchmarks.networks import NETWORKS
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import tiles
from mucudnn.networks import convolutional
from mucudnn.providers import stock_result
from mucudnn.providers.layout import Layout

STOCKS = Layout()
FORMATS = ("contiguous", "channels_last")
FORWARD, DATA, FILTER = Direction

GROUPS = {
    "5x5, depthwise": ((3, 32, 12, 10), (32, 1, 5, 5), 32),
    "3x3x3, depthwise": ((3, 16, 6, 7, 5), (16, 1, 3, 3, 3), 16),
    "3x3, 8 groups": ((3, 32, 9, 11), (48, 4, 3, 3), 8),
}


def grouped(name: str, direction: Direction = FILTER, **changes: Any) -> ConvProblem:
    """A convolution that torch gives to oneDNN, padded to keep the image's size."""
    x_shape, w_shape, groups = GROUPS[name]
    ones = (1,) * (len(x_shape) - 2)
    geometry = {"stride": ones, "padding": tuple(k // 2 for k in w_shape[2:]), "dilation": ones}
    return ConvProblem.of_convolution(direction, x_shape, w_shape, **{**geometry, "groups": groups, **changes})


def in_format(tensors: Operands, name: str) -> Operands:
    """The operands with all tensors in a memory format."""
    last = torch.channels_last if tensors.w.dim() == 4 else torch.channels_last_3d
    kind = torch.contiguous_format if name == "contiguous" else last
    return Operands(
        *(torch.empty_like(t, memory_format=kind).copy_(t) for t in (tensors.x, tensors.w, tensors.y)), tensors.bias
    )


def launch(provider: Layout, problem: ConvProblem, tensors: Operands, extents: list[int], add: bool = False) -> str:
    """Runs the one algorithm that is offered, and tells its name."""
    (algorithm,) = provider.algorithms(problem)
    parts = [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, extents)]
    assert all(provider.serves(part.problem, algorithm) for part in parts)
    provider.launch(algorithm, parts, add)
    return algorithm


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", GROUPS)
def test_onednns_groups_in_channels_last(name: str, direction: Direction) -> None:
    problem = grouped(name, direction)
    tensors = operands(problem, with_bias=direction is FORWARD)
    strides = tensors.target(problem).stride()
    assert launch(STOCKS, problem, tensors, [2, 1]) == "stock@channels_last"
    assert rounding_error(problem, tensors) < TOLERANCE["float32"]
    assert tensors.target(problem).stride() == strides


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_torchs_own_kernels_in_either_format(data: st.DataObject) -> None:
    drawn = data.draw(problems(dtypes=("float64", "float16")))
    problem = replace(drawn, formats=(data.draw(st.sampled_from(FORMATS)),) * 3)
    assume(STOCKS.algorithms(problem))
    tensors = operands(problem, with_bias=problem.direction == "forward" and data.draw(st.booleans()))
    tensors = in_format(tensors, problem.formats[0])
    split = data.draw(st.integers(1, problem.extent))
    extents = [size for size in (split, problem.extent - split) if size]
    other = {"contiguous": "stock@channels_last", "channels_last": "stock@contiguous"}
    assert launch(STOCKS, problem, tensors, extents) == other[problem.formats[0]]
    assert rounding_error(problem, tensors) < TOLERANCE[problem.dtype]


def test_weight_gradients_accumulate_on_request() -> None:
    problem = grouped("5x5, depthwise")
    tensors = operands(problem)
    tensors.w.fill_(3.0)
    launch(STOCKS, problem, tensors, [1, 2], add=True)
    added = replace(tensors, w=tensors.w - 3.0)
    assert rounding_error(problem, added) < 2 * TOLERANCE["float32"]
    assert not torch.allclose(tensors.w, reference(problem, tensors).float(), atol=1.0)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", FORMATS)
def test_copies_in_either_format_are_right(name: str, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.providers.layout.in_torch", lambda problem: True)
    problem = replace(grouped("3x3, 8 groups", direction), formats=(name,) * 3)
    tensors = in_format(operands(problem), name)
    assert launch(STOCKS, problem, tensors, [1, 2]) != f"stock@{name}"
    assert rounding_error(problem, tensors) < TOLERANCE["float32"]


STRIDED = {"stride": (2, 2), "dilation": (1, 1), "padding": (1, 1)}
DILATED = {"stride": (1, 1), "dilation": (2, 2), "padding": (2, 2)}


def image(direction: Direction = FORWARD, **changes: Any) -> ConvProblem:
    """A convolution of four images."""
    plain = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    return ConvProblem.of_convolution(direction, (4, 32, 12, 12), (32, 32, 3, 3), **{**plain, **changes})


POINTWISE = ConvProblem.of_convolution(
    FORWARD, (4, 8, 12, 12), (8, 8, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1),
    dtype="float64", formats=("channels_last",) * 3,
)  # fmt: skip
IN_GROUPS = ConvProblem.of_convolution(
    FORWARD, (4, 8, 12, 12), (8, 4, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=2,
    dtype="float64", formats=("channels_last",) * 3,
)  # fmt: skip
"""A weight of one element per channel is contiguous and channels-last at once: torch goes by its strides."""

NOTHING: tuple[str, ...] = ()
LAST, FIRST = ("stock@channels_last",), ("stock@contiguous",)
CHANNELS_LAST = {"formats": ("channels_last",) * 3}


@pytest.mark.parametrize(
    ("problem", "offered"),
    [
        (image(), NOTHING),
        (image(**CHANNELS_LAST), NOTHING),
        (image(dtype="bfloat16"), NOTHING),
        (image(dtype="float64"), NOTHING),
        (image(dtype="float64", **CHANNELS_LAST), FIRST),
        (image(dtype="float64", **STRIDED), LAST),
        (POINTWISE, NOTHING),
        (replace(POINTWISE, dtype="float16"), FIRST),
        (image(dtype="float64", **DILATED), LAST),
        (image(dtype="float64", formats=("strided", "contiguous", "contiguous"), **DILATED), NOTHING),
        (image(FILTER, dtype="float16", **DILATED), NOTHING),
        (image(FILTER, dtype="float64", **DILATED), LAST),
        (replace(image(FILTER, dtype="float64", **DILATED), groups=4, w_shape=(32, 8, 3, 3)), NOTHING),
        (grouped("5x5, depthwise"), LAST),
        (grouped("5x5, depthwise", **CHANNELS_LAST), NOTHING),
        (grouped("5x5, depthwise", dtype="bfloat16"), NOTHING),
        (grouped("5x5, depthwise", stride=(2, 2)), NOTHING),
        (grouped("5x5, depthwise", dilation=(2, 2)), NOTHING),
        (grouped("5x5, depthwise", padding=(3, 3)), NOTHING),
        (grouped("3x3x3, depthwise", dtype="float64"), NOTHING),
    ],
    ids=lambda value: f"{value.direction} {value}" if isinstance(value, ConvProblem) else "",
)
def test_what_is_offered(problem: ConvProblem, offered: tuple[str, ...]) -> None:
    if problem.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has another kernel for bfloat16 on a processor without AVX-512")
    assert tuple(STOCKS.algorithms(problem)) == offered


def test_nothing_is_offered_where_the_formats_are_one_or_padding_differs() -> None:
    problem = image(dtype="float64", **DILATED)
    assert STOCKS.algorithms(problem)
    assert not STOCKS.algorithms(replace(problem, x_shape=(4, 1, 12, 12), w_shape=(32, 1, 3, 3)))
    assert not STOCKS.algorithms(replace(problem, padding=(0, 2), x_shape=(4, 32, 10, 12)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("network", ["resnet18", "resnet50"])
def test_ordinary_networks_are_offered_nothing_more(network: str, threads: int) -> None:
    """No trial, and no time of planning, is spent on other formats of float32 images in mini-batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for layer in convolutional(NETWORKS[network].build, (4, *NETWORKS[network].input_shape)):
            for direction, name in itertools.product(Direction, FORMATS):
                assert not STOCKS.algorithms(replace(layer.problem, direction=direction, formats=(name,) * 3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("collected_once")
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("extents", [[3], [2, 1]], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        *(grouped(name) for name in GROUPS),
        *(replace(image(dtype="float64", **DILATED), formats=(name,) * 3) for name in FORMATS),
        replace(image(dtype="float64", transposed=True, stride=(2, 2)), formats=("contiguous",) * 3),
        IN_GROUPS,
    ],
    ids=str,
)
def test_the_copies_are_what_is_declared(problem: ConvProblem, extents: list[int], direction: Direction) -> None:
    """Beside what torch's own kernel holds for itself, on tensors that lie so already, no byte more and none less."""
    problem = replace(problem, direction=direction).with_extent(3)
    tensors = in_format(operands(problem), problem.formats[0])
    (algorithm,) = STOCKS.algorithms(problem)
    parts = [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, extents)]
    largest = parts[0].problem
    with TensorMemory() as memory:
        STOCKS.launch(algorithm, parts, accumulate=False)
    there = replace(largest, formats=(algorithm.partition("@")[2],) * 3)
    lying_so = in_format(operands(there), there.formats[0])
    with TensorMemory() as scratch:
        stock_result(there, lying_so)
    own = there.element_bytes * torch.Size(there.target_shape).numel()
    assert memory.peak - (scratch.peak - own) == STOCKS.workspace(largest, algorithm)


def test_a_program_computes_so_and_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 32, 16, 16).requires_grad_()
    layer = torch.nn.Conv2d(32, 32, 5, padding=2, groups=32)
    stock = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    with forced("stock@channels_last", planning="ahead"):
        found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
        used = {algorithm for record in mucudnn.report() for _, algorithm in record.parts}
    assert "stock@channels_last" in used
    for one, other in zip(found, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert one.stride() == other.stride()
