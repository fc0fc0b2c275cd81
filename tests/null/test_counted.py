"""Scratch memory of torch's own kernels on a card, cuDNN's workspaces, counted within the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import mucudnn
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.planning.planner import scratch
from mucudnn.providers import stock_result
from mucudnn.timing.measurement import synthetic_operands

GPU = torch.device("cuda", 0)
MIB = 2**20
X, W = (64, 64, 27, 27), (192, 64, 5, 5)


@pytest.fixture(autouse=True)
def only_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No convolution is computed; each may use TF32, whose kernels hold more."""
    monkeypatch.setenv("NULL_CARD_CONVOLUTIONS", "0")
    precision = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield
    torch.backends.cudnn.conv.fp32_precision = precision


def problem(direction: Direction) -> ConvProblem:
    """The second convolution of AlexNet."""
    return ConvProblem.of_convolution(direction, X, W, stride=(1, 1), padding=(2, 2), dilation=(1, 1))


def peak_bytes(work: Callable[[], torch.Tensor]) -> int:
    """By the peak that torch's allocator counts, beyond the result."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return torch.cuda.max_memory_allocated() - before - result.element_size() * math.prod(result.shape)


@pytest.mark.parametrize("direction", Direction)
def test_a_workspace_of_cudnn_is_scratch(direction: Direction) -> None:
    asked = problem(direction)
    given = synthetic_operands(asked, GPU)
    held = peak_bytes(lambda: stock_result(asked, given))
    counted = scratch(asked, GPU)
    assert min(held, counted) >= 2**19
    assert abs(counted - held) <= MIB  # of a cached block that is up to so much larger, the allocator counts the whole


def test_a_limit_is_a_promise() -> None:
    given = synthetic_operands(problem(Direction.BACKWARD_FILTER), GPU)
    geometry = (1, 1), (2, 2), (1, 1), False, (0, 0), 1

    def gradient() -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.convolution_backward(
            given.y, given.x, given.w, None, *geometry, [False, True, False]
        )[1]
        return found

    with mucudnn.patched(workspace_limit="4MiB", count_stock=True, database=":memory:", progress="off", check="off"):
        gradient()
        (record,) = mucudnn.report()
        held = peak_bytes(gradient)
    assert record.stock_workspace is not None and record.stock_workspace > 32 * MIB
    assert record.workspace <= 4 * MIB
    assert held <= (4 + 2) * MIB  # the allocator leaves up to 1 MiB of a block unused
