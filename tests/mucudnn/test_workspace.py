"""Declared workspaces against the memory that launches really hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import problems
from references import operands
from tensor_memory import TensorMemory

import mucudnn
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import tiles
from mucudnn.providers.fft import FFT, Fft
from mucudnn.providers.gemm import GEMM, Gemm
from mucudnn.providers.onednn import ONEDNN, OneDnn
from mucudnn.providers.stock import Stock
from mucudnn.timing.measurement import Measurement

PROVIDERS = {FFT: Fft(), GEMM: Gemm(), ONEDNN: OneDnn()}


def widened(problem: ConvProblem, given: Operands) -> Operands:
    """The operands as algorithms get them: sums of weight gradients in half types are float32."""
    return replace(given, w=given.w.float()) if problem.is_half and problem.target is Role.W else given


@pytest.mark.usefixtures("collected_once")
@pytest.mark.parametrize("algorithm", PROVIDERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_peak_stays_within_what_is_declared(algorithm: str, data: st.DataObject) -> None:
    if algorithm == ONEDNN:
        problem = data.draw(problems(dtypes=("float32",), max_extent=6, ordinary=True))
    else:
        problem = data.draw(problems(dtypes=("float32", "float64", "bfloat16"), max_extent=6))
    tensors = widened(problem, operands(problem))
    size = data.draw(st.integers(1, problem.extent))
    extents = [size] * (problem.extent // size) + [problem.extent % size] * bool(problem.extent % size)
    provider = PROVIDERS[algorithm]
    parts = [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, extents)]
    assume(all(algorithm in provider.algorithms(part.problem) for part in parts))
    declared = max(provider.workspace(part.problem, algorithm) for part in parts)
    with TensorMemory() as memory:
        provider.launch(algorithm, parts, accumulate=False)
    assert memory.peak <= declared


WINDOWS = {
    "apart": (Direction.FORWARD, (1, 4, 15, 8), (5, 4, 1, 1), (1, 2), (0, 0), (1, 1)),
    "overlapping": (Direction.BACKWARD_FILTER, (1, 1, 5, 1, 5), (3, 1, 3, 5, 5), (2, 1, 1), (2, 2, 0), (1, 1, 1)),
    "of taps apart": (Direction.BACKWARD_FILTER, (6, 1, 10, 11), (2, 1, 1, 7), (1, 2), (0, 4), (1, 3)),
    "next to each other": (Direction.FORWARD, (3, 4, 12, 9), (6, 4, 1, 1), (1, 1), (0, 0), (1, 1)),
    "of a large weight": (Direction.FORWARD, (1, 8, 3, 3), (64, 8, 3, 3), (1, 1), (0, 0), (1, 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_that_no_matrix_product_reads_are_copied_within_what_is_declared(windows: str, dtype: str) -> None:
    direction, x_shape, w_shape, stride, padding, dilation = WINDOWS[windows]
    problem = ConvProblem.of_convolution(
        direction, x_shape, w_shape, stride=stride, padding=padding, dilation=dilation, dtype=dtype
    )
    tensors = widened(problem, operands(problem))
    if len(w_shape) == 4:
        tensors = replace(tensors, w=tensors.w.contiguous(memory_format=torch.channels_last))
    with TensorMemory() as memory:
        PROVIDERS[GEMM].launch(GEMM, [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, [x_shape[0]])], False)
    assert memory.peak <= PROVIDERS[GEMM].workspace(problem, GEMM)


@pytest.mark.parametrize("algorithm", [FFT, GEMM])
@pytest.mark.parametrize("direction", Direction)
def test_declared_workspace_is_not_much_too_large(algorithm: str, direction: Direction) -> None:
    problem = ConvProblem.of_convolution(
        direction, (8, 16, 32, 32), (16, 16, 7, 7), stride=(1, 1), padding=(3, 3), dilation=(1, 1)
    )
    tensors = operands(problem)
    with TensorMemory() as memory:
        PROVIDERS[algorithm].launch(algorithm, [tile.part(tensors) for tile in tiles(problem, Dim.BATCH, [8])], False)
    declared = PROVIDERS[algorithm].workspace(problem, algorithm)
    assert 0.75 * declared <= memory.peak <= declared


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("limit", [2**18, 2**20, 2**22])
@pytest.mark.parametrize("direction", Direction)
def test_a_patched_call_stays_within_the_limit(
    limit: int, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own kernel made to look slow, the division within the limit is taken, and its memory is measured."""

    def slow_stock(self: Measurement) -> float:
        return 1e3

    monkeypatch.setattr(Measurement, "stock_seconds", slow_stock)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    torch.manual_seed(0)
    x, w = torch.randn(16, 4, 24, 24), torch.randn(8, 4, 9, 9)
    y = torch.ops.aten.convolution(x, w, None, (1, 1), (4, 4), (1, 1), False, (0, 0), 1)
    geometry = ((1, 1), (4, 4), (1, 1), False, (0, 0), 1)
    mask = [direction is Direction.BACKWARD_DATA, direction is Direction.BACKWARD_FILTER, False]

    def call() -> torch.Tensor:
        if direction is Direction.FORWARD:
            return torch.ops.aten.convolution(x, w, None, *geometry)
        gradients = torch.ops.aten.convolution_backward(y, x, w, None, *geometry, mask)
        return next(gradient for gradient in gradients if gradient is not None)

    with mucudnn.patched(workspace_limit=limit, database=":memory:"):
        call()
        (record,) = mucudnn.report()
        with TensorMemory() as memory:
            result = call()
    assert record.workspace <= limit
    if limit > 2**18:  # as little as that fits no algorithm here
        assert {algorithm for _, algorithm in record.parts} <= PROVIDERS.keys()
        assert memory.peak <= limit + math.prod(result.shape) * 4
