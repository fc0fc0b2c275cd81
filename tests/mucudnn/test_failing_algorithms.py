"""What happens when an algorithm fails that a plan has."""

from __future__ import annotations

import math

import pytest
import torch
from forced import Forced, divided
from torch.nn import functional

import mucudnn
from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Dim, Direction
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Option
from mucudnn.planning.plan import Plan
from mucudnn.providers import HOST_PROVIDERS
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.stock import Stock
from mucudnn.reporting.record import Record
from mucudnn.runtime.fixed import Fixed
from mucudnn.timing.schedule import Schedule


class Fault:
    """Makes a provider's launches fail from an extent on."""

    def __init__(self, provider: type, least: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = provider.launch

        def failing(self, algorithm, parts, accumulate):  # type: ignore[no-untyped-def]
            for part in parts:
                part.result.fill_(math.nan)
            if max(part.problem.extent for part in parts) >= least:
                raise error
            launch(self, algorithm, parts, accumulate)

        monkeypatch.setattr(provider, "launch", failing)


@pytest.mark.parametrize("error", [RuntimeError("algorithm failed"), MemoryError(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({Fft: 8}, [(4, "fft"), (4, "fft")]),
        ({Fft: 1}, [(8, "gemm")]),
        ({Fft: 1, Gemm: 1}, [(4, "stock"), (4, "stock")]),
        ({Fft: 1, Gemm: 1, Stock: 1}, [(8, "stock")]),
    ],
    ids=["smaller parts", "another algorithm", "parts of torch's kernel", "torch's kernel"],
)
def test_a_failing_plan_falls_to_the_next_best(
    faults: dict[type, int], expected: list[tuple[int, str]], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        Option(8, "fft", 0.1, 80),
        Option(4, "fft", 0.1, 40),
        Option(8, "gemm", 0.3, 80),
        Option(4, "stock", 0.4, 4),
    ]

    torch.manual_seed(0)
    x, w = torch.randn(8, 3, 9, 9, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    call = Call(Direction.FORWARD, x, w, None, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    exact = functional.conv2d(x, w)
    convolution = call.problem(exact)
    assert convolution is not None
    providers = {name: provider for provider in HOST_PROVIDERS for name in provider.algorithms(convolution)}
    schedule = Schedule(convolution, Division((options[0],)), providers)
    record = Record(convolution, "forward", math.inf, ((8, "fft"),), 0.1, 0.1, 1.0, 0)
    plan = Plan(schedule, record, {Dim.BATCH: options})
    decision = Fixed(plan, exact.stride(), device_of(x.device))
    assert decision.run(call) is not None
    for provider, least in faults.items():
        Fault(provider, least, error, monkeypatch)
    with pytest.warns(RuntimeWarning, match="goes on with the next best plan") as warned:
        results = [decision.run(call), decision.run(call)]
    (record,) = decision.records()
    assert list(record.parts) == expected
    for result in results:
        if expected == [(8, "stock")]:
            assert result is None  # left to the caller, who has torch's own kernel
        else:
            torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)
    assert len([w for w in warned if issubclass(w.category, RuntimeWarning)]) == 1
    assert "\n" not in str(warned[0].message)


def test_a_call_whose_algorithm_fails_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(8, 3, 9, 9, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    expected = functional.conv2d(x, w)
    with mucudnn.patched(database=":memory:", board=Forced("fft")):
        torch.testing.assert_close(functional.conv2d(x, w), expected, rtol=1e-12, atol=1e-12)
        assert divided() == 1
        Fault(Fft, 1, MemoryError(), monkeypatch)
        with pytest.warns(RuntimeWarning, match="goes on with the next best plan"):
            torch.testing.assert_close(functional.conv2d(x, w), expected, rtol=1e-12, atol=1e-12)
        assert divided() == 0
