"""Fixtures of the tests that need a GPU; where there is none they are skipped, with the reason.

They also run on the null card (tests/null_card), which computes convolutions and other operators on the host.

GPU_TESTS_DEVICE=cpu tries the tests themselves on the host: the same code against the host's algorithms, without what
is CUDA's own (streams, graphs, memory).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest
import torch

import mucudnn
from mucudnn.convolution.call import Operands
from mucudnn.devices.gpu import GpuClock
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers.stock import Stock
from mucudnn.timing.measurement import Measurement


def _missing() -> str | None:
    if os.environ.get("GPU_TESTS_DEVICE") == "cpu":
        return None
    if not torch.backends.cuda.is_built():
        return f"no GPU: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU: torch finds no CUDA device"
    if not torch.backends.cudnn.is_available():
        return f"no cuDNN in torch {torch.__version__}"
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests compute."""
    if reason := _missing():
        pytest.skip(reason)
    return torch.device(os.environ.get("GPU_TESTS_DEVICE", "cuda:0"))


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """As `device`, for what a host has nothing like."""
    if device.type != "cuda":
        pytest.skip("no GPU: tried on the host")
    return device


@pytest.fixture(autouse=True)
def unpatched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test leaves torch as it was, and starts at strict float32, planned ahead on a host as on a GPU."""
    monkeypatch.setenv("MUCUDNN_PLANNING", "ahead")
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before
    mucudnn.unpatch()


@pytest.fixture(autouse=True)
def on_the_null_card(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There what is only timed is not computed, which would take most of the time, and every other kernel must be."""
    if "NULL_CARD_CUDNN" not in os.environ:
        yield
        return
    null_card = importlib.import_module("null_card")
    for name in ("first", "seconds"):
        monkeypatch.setattr(GpuClock, name, null_card.only_timed()(getattr(GpuClock, name)))
    before = null_card.counted("uncomputed")
    with importlib.import_module("null_card_order").in_order():
        yield
    assert null_card.counted("uncomputed") == before, "kernels of torch were launched that compute nothing"


@pytest.fixture
def slow_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch's own kernel look slow: the best division within the limit is taken, whatever it takes."""
    laps = TrialRunner.laps

    def slow(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        return [1e3] if trial.division is None else laps(runner, trial, given)

    monkeypatch.setattr(TrialRunner, "laps", slow)
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
