"""What serves a convolution when cuDNN fails at run time: the order, the numbers, one warning. On a simulated cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_card import SimulatedCard
from torch.nn import functional

import mucudnn
from mucudnn.convolution.call import Call, Operands
from mucudnn.convolution.problem import Dim, Direction
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import STOCK
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.providers.cudnn.library import Unavailable
from mucudnn.providers.stock import Stock
from mucudnn.timing.measurement import Candidate, Measurement
from mucudnn.timing.schedule import LaunchError

pytestmark = pytest.mark.usefixtures("ahead")

SECONDS = {"eng1": 0.1, "eng0": 0.2, "legacy_fft": 0.3, "legacy_fft_tiling": 0.4, STOCK: 0.5}
"""Of a sample, beside a second of torch's own kernel undivided. Others take forever."""

SHAPE, FILTERS = (4, 3, 9, 9), (4, 3, 3, 3)
DIRECTIONS = list(Direction)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCard]:
    """Simulated, serving the host's convolutions at made-up times."""
    card = SimulatedCard()
    serve(monkeypatch, card)

    def seconds(self: Measurement, candidate: Candidate, dim: Dim, size: int, most: float) -> float:
        name = candidate[1]
        if name not in SECONDS or dim is not Dim.BATCH:
            raise LaunchError(name, size, RuntimeError("it takes forever"))
        return SECONDS[name] * size

    def laps(self: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        if trial.division is None:
            return [4.0]
        self.run(trial, given)
        return [sum(SECONDS[option.algorithm] * option.extent for option in trial.division.options)]

    monkeypatch.setattr(Measurement, "seconds", seconds)
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: float(4))
    monkeypatch.setattr(TrialRunner, "laps", laps)
    yield card


def serve(monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    providers = (Stock(), Engines(place), Legacy(place))
    monkeypatch.setattr("mucudnn.planning.planner.providers_on", lambda device, engines: providers)


def compute(direction: Direction, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if direction is Direction.FORWARD:
        return functional.conv2d(x, w, padding=1)
    x, w = x.clone().requires_grad_(direction is Direction.BACKWARD_DATA), w.clone()
    w.requires_grad_(direction is Direction.BACKWARD_FILTER)
    functional.conv2d(x, w, padding=1).pow(2).sum().backward()
    gradient = x.grad if direction is Direction.BACKWARD_DATA else w.grad
    assert gradient is not None
    return gradient


def algorithms(direction: Direction) -> str:
    """Those of the direction's record."""
    (record,) = (record for record in mucudnn.report() if record.direction == direction)
    return " ".join(dict.fromkeys(algorithm for _, algorithm in record.parts))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_order_with_right_numbers_and_one_warning(direction: Direction, card: SimulatedCard) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (SHAPE, FILTERS))
    expected = compute(direction, x, w)
    with mucudnn.patched(workspace_limit=2048, policy="powerOfTwo", database=":memory:", progress="off"):
        served = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for failing in (None, "eng1", "eng0", "legacy_fft", "legacy_fft_tiling"):
                if failing is not None:
                    card.simulated.failing.add(failing)
                torch.testing.assert_close(compute(direction, x, w), expected, rtol=1e-12, atol=1e-12)
                served.append(algorithms(direction))
        assert served == ["eng1", "eng0", "legacy_fft", "legacy_fft_tiling", STOCK]
        told = [str(warning.message) for warning in caught if "goes on with the next best plan" in str(warning.message)]
        assert len([line for line in told if line.startswith(f"{direction} ")]) == 1
        assert "eng1 was told to fail" in told[0] or direction is not Direction.FORWARD


def test_a_larger_part_that_fails_leaves_the_smaller(card: SimulatedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out for a workspace: smaller micro-batches of the same engine go on."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (SHAPE, FILTERS))
    expected = functional.conv2d(x, w, padding=1)
    scratch = card.scratch

    def short(size: int) -> torch.Tensor:
        if size > 1024:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        return scratch(size)

    with mucudnn.patched(workspace_limit=4096, database=":memory:", progress="off"):
        functional.conv2d(x, w, padding=1)  # plans, and finds room for everything
        monkeypatch.setattr(card, "scratch", short)
        with pytest.warns(RuntimeWarning, match="out of memory"):
            actual = functional.conv2d(x, w, padding=1)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        (record,) = mucudnn.report()
        assert record.parts == ((1, "eng1"),) * 4


def test_no_memory_to_measure_leaves_a_convolution_to_torch(
    card: SimulatedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: Measurement) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Measurement, "stock_seconds", none)
    x, w = torch.randn(SHAPE), torch.randn(FILTERS)
    expected = functional.conv2d(x, w)
    with mucudnn.patched(database=":memory:"):
        with pytest.warns(RuntimeWarning, match="is left to torch, as it could not be measured: CUDA out of memory"):
            assert torch.equal(functional.conv2d(x, w), expected)
        assert torch.equal(functional.conv2d(x, w), expected)


def test_without_cudnn_convolutions_are_torchs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(device: torch.device, engines: str) -> None:
        raise Unavailable("2 copies of cuDNN are loaded")

    monkeypatch.setattr("mucudnn.planning.planner.providers_on", unavailable)
    x, w = torch.randn(SHAPE), torch.randn(FILTERS)
    expected = functional.conv2d(x, w)
    with mucudnn.patched(database=":memory:"):
        with pytest.warns(RuntimeWarning, match="convolutions on cpu are left to torch: 2 copies") as caught:
            for stride in (1, 1, 2):
                actual = functional.conv2d(x, w, stride=stride)
                assert stride == 2 or torch.equal(actual, expected)
        assert len(caught) == 1
        assert mucudnn.report() == []


def test_only_what_torch_gives_to_cudnn_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(
        Direction.FORWARD,
        torch.randn(SHAPE),
        torch.randn(FILTERS),
        None,
        None,
        (1, 1),
        (1, 1),
        (1, 1),
        False,
        (0, 0),
        1,
    )
    assert not call.is_for_cudnn()  # the host's
    for name, expected in (("Cudnn", True), ("CudnnTranspose", True), ("CudaDepthwise2d", False), ("Slow2d", False)):
        backend = torch._C._ConvBackend.__members__[name]
        monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, backend=backend: backend)
        assert call.is_for_cudnn() == expected


def test_doctor_says_what_is_wrong_in_a_sentence(card: SimulatedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    from mucudnn.convolution.problem import ConvProblem
    from mucudnn.providers.cudnn import state

    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    problem = ConvProblem.of_convolution(Direction.FORWARD, SHAPE, FILTERS, **geometry)
    providers = (Stock(), Engines(card), Legacy(card))

    def broken(device: torch.device) -> tuple[()]:
        raise RuntimeError("CUDA driver version is insufficient\nand much more")

    def unavailable() -> None:
        raise Unavailable("2 copies of cuDNN are loaded")

    monkeypatch.setattr(state, "library", unavailable)
    assert state.found(problem, broken) == {"state": "not used: 2 copies of cuDNN are loaded"}
    monkeypatch.setattr(state, "library", lambda: card.library)
    assert state.found(problem, broken)["state"] == "not used: torch finds no GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert state.found(problem, broken)["gpus"][0]["refused"] == {"everything": "CUDA driver version is insufficient"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    (gpu,) = state.found(problem, lambda device: providers)["gpus"]
    assert gpu["gpu"] == "a card"
    assert gpu["algorithms"][0] == STOCK and "eng0" in gpu["algorithms"]
    assert "narrower" in gpu["refused"]["eng4"]
    assert "not on this card" in gpu["refused"]["legacy_winograd"]
