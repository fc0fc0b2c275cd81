"""Programs whose peak memory does not rise, whatever workspace their convolutions take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensor_memory import TensorMemory, no_garbage
from torch import nn

import mucudnn
from mucudnn.devices import Host, device_of
from mucudnn.providers.stock import Stock
from mucudnn.timing import clock
from mucudnn.timing.measurement import Measurement

pytestmark = pytest.mark.usefixtures("ahead")

HOST = device_of(torch.device("cpu"))


KIB = 2**10
MIB = 2**20


def network(width: int = 6) -> nn.Sequential:
    """Large kernels, of which the first and the last leave most memory to others."""
    blocks = [
        layer
        for _ in range(3)
        for layer in (nn.Conv2d(width, width, 9, padding=4), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.0))
    ]
    return nn.Sequential(nn.Conv2d(2, width, 3, padding=1), *blocks, nn.Conv2d(width, 2, 1))


class Program:
    """A training loop, the peak of tensors' memory taken in every step."""

    def __init__(self, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.module = network()
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.accumulate = accumulate
        self.losses: list[float] = []
        self.number = 0

    def step(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(self.number)
        x = torch.randn(samples, 2, 24, 24, generator=generator)
        loss = self.module(x).square().mean()
        loss.backward()
        self.number += 1
        if self.number % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def peaks(self, batches: list[int], measured: int) -> list[int]:
        """Of the last `measured` steps; the profiler measures no step in which budgets are recorded."""
        unmeasured = len(batches) - measured
        for samples in batches[:unmeasured]:
            self.step(samples)
        found = []
        with no_garbage():
            for samples in batches[unmeasured:]:
                with TensorMemory() as memory:
                    self.step(samples)
                found.append(memory.peak)
        return found


@pytest.fixture
def slow_stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own kernel looks slow, so that workspace is taken wherever there is some."""
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)
    monkeypatch.setattr(clock, "seconds", clock.first_seconds)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    return


PROGRAMS: dict[str, tuple[int, list[int], int]] = {
    "one shape": (1, [4] * 10, 4),
    "another shape": (1, [4] * 7 + [6, 4, 6, 2, 4, 6], 6),
    "a new shape that stays": (1, [4] * 7 + [6] * 8, 3),
    "accumulated gradients": (3, [4] * 15, 6),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_step_s_peak_rises(kind: str, slow_stock: None) -> None:
    accumulate, batches, measured = PROGRAMS[kind]
    plain = Program(accumulate)
    expected = plain.peaks(batches, measured)
    with mucudnn.patched(workspace_limit="peak", database=":memory:") as session:
        patched = Program(accumulate)
        peaks = patched.peaks(batches, measured)
        records = session.records()
        timeline = session.timeline()
    assert peaks <= expected and all(peak <= most for peak, most in zip(peaks, expected, strict=True))
    assert max(record.workspace for record in records) > 64 * KIB
    assert sum(moment.workspace > 0 for moment in timeline) >= 5
    assert all(moment.workspace <= moment.budget for moment in timeline)
    torch.testing.assert_close(patched.losses, plain.losses, rtol=1e-3, atol=1e-5)


def test_planning_within_a_step_does_not_raise_its_peak_either(
    slow_stock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = max(Program().peaks([4] * 4, 2))
    program = Program()
    with mucudnn.patched(workspace_limit="peak", database=":memory:") as session:
        with monkeypatch.context() as capture:
            # As in the capture of a CUDA graph nothing is measured: the step has budgets, but no plans yet.
            capture.setattr(Host, "is_capturing", lambda self: session.timeline() != [])
            program.peaks([4] * 5, 0)
        assert session.records() == [] and len(session.timeline()) > 0
        with TensorMemory() as memory:
            program.step(4)
        assert max(record.workspace for record in session.records()) > 64 * KIB
    assert memory.peak <= plain


def test_a_limit_on_all_memory(slow_stock: None) -> None:
    program = Program()

    def most(limit: float) -> int:
        with mucudnn.patched(memory_limit=limit, database=":memory:") as session:
            for _ in range(7):
                program.step(4)
            return max((record.workspace for record in session.records()), default=0)

    assert most(2**40) > 64 * KIB
    now = HOST.bytes_in_use()  # the first profiler leaves some of its own behind
    assert most(now) == 0
    assert 0 < most(now + 3 * MIB) <= 3 * MIB


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workspace_limit": "peak", "total_workspace_size": "1MiB"}, "workspace_limit=peak and total_workspace_size"),
        ({"memory_limit": "1GiB", "total_workspace_size": "1MiB"}, "memory_limit=1 GiB and total_workspace_size"),
        ({"memory_limit": "peak"}, "memory_limit='peak'"),
    ],
)
def test_what_excludes_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mucudnn.patch(**given)


def test_the_command_takes_them(tmp_path: Any, slow_stock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mucudnn.__main__ import main
    from mucudnn.reporting.record import Outcome

    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import torch\n"
        "c = torch.nn.Conv2d(2, 2, 9, padding=4)\n"
        "d = torch.nn.Conv2d(2, 2, 9, padding=4)\n"
        "for _ in range(7):\n"
        "    d(c(torch.ones(4, 2, 32, 32)).relu().exp()).sum().backward()\n"
    )
    arguments = ["run", "--workspace-limit", "peak", "--database", ":memory:", "--report", str(report), str(script)]
    assert main(arguments) == 0
    import json

    outcome = Outcome.from_json(json.loads(report.read_text()))
    assert len(outcome.timeline) == 5 and outcome.timeline[0].name.startswith("forward 4x2x32x32")
    assert all(0 <= moment.workspace <= moment.budget < math.inf for moment in outcome.timeline)
