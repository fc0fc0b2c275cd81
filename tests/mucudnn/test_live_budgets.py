"""Live planning under totals and under budgets by step: what is tried keeps to them too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_up_clock import MadeUp
from test_shared_total import Meter
from test_shared_total import network as four_layers
from test_step_budget import Program

import mucudnn
from mucudnn.optimizer import OverheadBudget
from mucudnn.runtime import explored as exploring
from mucudnn.runtime.watched import Watched

KIB = 2**10


@pytest.fixture
def fast_fft(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """An algorithm that takes a tenth of what torch's own kernel takes, so that workspace is worth having."""
    monkeypatch.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: True)
    monkeypatch.setattr(exploring, "WORTH", 0)
    return MadeUp(monkeypatch, fft=0.1)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(steps: int) -> list[float]:
    """Losses of a network of four convolutions."""
    module, losses = four_layers(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(6, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("fast_fft")
@pytest.mark.parametrize("total", [256 * KIB, 1024 * KIB])
def test_trials_and_shares_keep_to_the_total(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(60)
    meter = Meter(monkeypatch)
    with mucudnn.patched(planning="live", total_workspace_size=total, database=":memory:") as session:
        found = trained(60)
        records = [record for record in session.records() if record.workspace]
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=0)
    assert 0 < meter.most <= total and meter.launches > 100
    assert sum(record.workspace for record in records) <= total
    assert any("fft" in record.division for record in records)
    assert len({record.limit for record in records}) > 1, "layers of different shapes gain differently"
    assert session.outcome().notices == []


@pytest.mark.usefixtures("fast_fft")
def test_the_next_run_begins_with_what_was_found_within_the_total(own_database: Path) -> None:
    divisions = []
    for steps in (60, 6):
        with mucudnn.patched(planning="live", total_workspace_size="512KiB") as session:
            trained(steps)
            records = session.records()
            divisions.append(sorted((str(record.problem), record.division) for record in records if record.workspace))
            tried = sum(record.trials for record in records)
    assert divisions[0] == divisions[1] != [] and tried == 0


@pytest.mark.usefixtures("fast_fft")
def test_no_step_s_peak_rises_while_its_budgets_are_explored() -> None:
    batches, measured = [4] * 40, 31  # the speed of memory, which takes 32 MiB, is measured once before
    plain = Program()
    expected = plain.peaks(batches, measured)
    with mucudnn.patched(planning="live", workspace_limit="peak", database=":memory:") as session:
        patched = Program()
        peaks = patched.peaks(batches, measured)
        records, timeline = session.records(), session.timeline()
    assert all(peak <= most for peak, most in zip(peaks, expected, strict=True))
    assert max(record.workspace for record in records) > 64 * KIB
    assert sum(record.trials for record in records) > 0 and session.outcome().notices == []
    assert sum(moment.workspace > 0 for moment in timeline) >= 5
    assert all(moment.workspace <= moment.budget for moment in timeline)
    torch.testing.assert_close(patched.losses, plain.losses, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("fast_fft")
def test_a_limit_of_memory_is_explored_too() -> None:
    with mucudnn.patched(planning="live", memory_limit="64GiB", database=":memory:") as session:
        trained(60)
        records = session.records()
    assert any("fft" in record.division for record in records)
    assert sum(record.trials for record in records) > 0


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("budget", [{"workspace_limit": "peak"}, {"total_workspace_size": "1MiB"}])
def test_what_is_to_be_the_same_in_every_run_is_measured_ahead(
    budget: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "run", lambda *arguments: pytest.fail("it was explored"))
    with mucudnn.patched(planning="live", database=":memory:", **budget):  # type: ignore[arg-type]
        trained(4)
