"""Workspaces on a GPU: the peak stays within the limit, and where memory runs out the step completes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch

import mucudnn
from mucudnn.convolution.problem import Dim, Direction
from mucudnn.timing.measurement import Candidate, Measurement

MIB = 2**20

ASKED_FOR = "requested_bytes.all"
SLACK = 64 * 1024
"""Bytes of the small tensors that a call makes besides."""

SAMPLES = 16 if "NULL_CARD_CUDNN" in os.environ else 64
"""The null card computes on the host, a quarter of them in a quarter of the time."""

Call = Callable[[], torch.Tensor]


def call_of(direction: Direction, device: torch.device, samples: int) -> Call:
    """AlexNet's second convolution, whose engines need workspaces of very different sizes."""
    torch.manual_seed(0)
    x, w = torch.randn(samples, 64, 27, 27, device=device), torch.randn(192, 64, 5, 5, device=device)
    y = torch.randn(samples, 192, 27, 27, device=device)
    geometry = ((1, 1), (2, 2), (1, 1), False, (0, 0), 1)
    mask = [direction is Direction.BACKWARD_DATA, direction is Direction.BACKWARD_FILTER, False]

    def call() -> torch.Tensor:
        if direction is Direction.FORWARD:
            return torch.ops.aten.convolution(x, w, None, *geometry)
        gradients = torch.ops.aten.convolution_backward(y, x, w, None, *geometry, mask)
        return next(gradient for gradient in gradients if gradient is not None)

    return call


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return ((found - expected).double().norm() / expected.double().norm()).item() < 1e-5


@pytest.mark.usefixtures("slow_stock")
@pytest.mark.parametrize("limit", [1 * MIB, 16 * MIB, 64 * MIB, 512 * MIB])
@pytest.mark.parametrize("direction", Direction)
def test_peak_stays_within_the_limit(direction: Direction, limit: int, cuda: torch.device) -> None:
    call = call_of(direction, cuda, SAMPLES)
    expected = call()
    with mucudnn.patched(workspace_limit=limit, database=":memory:", progress="off"):
        call()
        (record,) = mucudnn.report()
        assert record.workspace <= limit
        assert record.division != f"stock({SAMPLES})", "nothing fits"
        torch.cuda.synchronize(cuda)
        torch.cuda.reset_peak_memory_stats(cuda)
        before = torch.cuda.memory_stats(cuda)
        result = call()
        torch.cuda.synchronize(cuda)
        # What was asked for: of a block whose rest is at most 1 MiB the allocator counts the rest, too.
        peak = torch.cuda.memory_stats(cuda)[f"{ASKED_FOR}.peak"] - before[f"{ASKED_FOR}.current"] - result.nbytes
    assert peak <= record.workspace + SLACK
    assert close(result, expected)


@pytest.mark.usefixtures("slow_stock")
@pytest.mark.parametrize("direction", Direction)
def test_where_memory_runs_out_the_next_plan_serves(direction: Direction, cuda: torch.device, greedy: None) -> None:
    torch.cuda.empty_cache()  # else operands would keep larger segments of earlier tests, whose rests serve the call
    call = call_of(direction, cuda, 64)
    expected = call()
    total = torch.cuda.get_device_properties(cuda).total_memory
    with mucudnn.patched(workspace_limit="4GiB", database=":memory:", progress="off"):
        call()
        (record,) = mucudnn.report()
        if record.workspace < 32 * MIB:
            pytest.skip(f"no engine of this cuDNN takes much workspace here: {record.division}, {record.workspace} B")
        torch.cuda.synchronize(cuda)
        torch.cuda.empty_cache()
        # What is still reserved and free are rests of small segments. No such workspace fits there.
        rest = expected.nbytes + 4 * MIB + record.workspace // 2
        room = torch.cuda.memory_reserved(cuda) + rest
        torch.cuda.set_per_process_memory_fraction(room / total, cuda)
        try:
            with pytest.warns(RuntimeWarning, match="goes on with the next best plan") as told:
                result = call()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                again = call()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, cuda)
        (after,) = mucudnn.report()
    assert len(told) == 1
    assert after.workspace <= rest
    assert close(result, expected) and close(again, expected)


@pytest.fixture
def greedy(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes launches look the faster the more workspace they take."""

    def seconds(self: Measurement, candidate: Candidate, dim: Dim, size: int, most: float) -> float:
        return size / (1 + (self.workspace(candidate, dim, size) or 0))

    monkeypatch.setattr(Measurement, "seconds", seconds)
