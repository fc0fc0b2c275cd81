"""The benchmark of workspace division: its three ways in their order, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from benchmarks.planning import sharing
from mucudnn import is_patched
from mucudnn.networks import layers
from mucudnn.optimizer import Option
from mucudnn.planning.on_record import times
from mucudnn.timing.logbook import Environment

HERE = Environment("made up", 2, False, "", "")


def test_by_the_times_on_record_reuse_wins_over_shares_and_shares_over_equal_parts() -> None:
    network = layers.convolutional(sharing.large_kernels, (8, 1, 32, 32))
    contents = []
    for number, layer in enumerate(network):
        fft = [Option(size, "fft", 0.01 * size + 0.002, size * (number + 1) << 18) for size in (1, 2, 4, 8)]
        contents.append(({**layer.problem.launch_key(), **HERE.launch_key()}, [Option(8, "stock", 0.5, 0), *fft]))
    (known,) = times(contents)
    rows = list(sharing.planned("large kernels", network, known))
    assert len(rows) == len(sharing.FRACTIONS)
    for row in rows:
        assert row.kernels == sum(layer.count for layer in network)
        assert row.reused <= row.wd <= row.equal <= row.stock
        assert row.gap == 0
    assert rows[0].wd < rows[0].equal
    assert rows[-1].wd == pytest.approx(rows[-1].reused)
    shown = list(sharing.tables(rows, [], [sharing.Solved("WD", 0.01, 0.0, 0.1)]))
    assert [len(table.rows) for table in shown] == [len(rows), 1]


def test_training_steps_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "ROUNDS", 2)

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 2))

    run = sharing.trained("small", build, (4, 1, 8, 8), 2**20, 2, str(tmp_path / "times.sqlite"))
    assert run.seconds.keys() == run.speedups.keys() == {"stock", "equal", "wd", "reused"}
    assert run.speedups["stock"] == 1 and min(run.seconds.values()) > 0
    assert run.workspace <= run.total
    assert not is_patched()
