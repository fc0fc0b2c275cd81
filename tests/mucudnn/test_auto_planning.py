"""Where planning is live unless a user chooses: on a processor, where runs need not be the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from boards import Alone
from made_up_clock import MadeUp
from torch.nn import functional

import mucudnn
from mucudnn.runtime.live import LivePlanning
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings

X, W = torch.randn(8, 3, 12, 12), torch.randn(5, 3, 5, 5)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trials(calls: int, **settings: str) -> int:
    """The trials that are reported after so many calls."""
    with mucudnn.patched(database=":memory:", progress="off", **settings) as session:  # type: ignore[arg-type]
        for _ in range(calls):
            functional.conv2d(X, W)
        return sum(record.trials for record in session.records())


def test_a_processors_convolutions_are_explored_on_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, fft=0.1)
    monkeypatch.delenv("MUCUDNN_PLANNING", raising=False)
    assert trials(30) > 0
    assert trials(30, planning="auto") > 0
    assert trials(30, planning="ahead") == 0


@pytest.mark.usefixtures("deterministic")
def test_what_is_to_be_the_same_every_time_is_measured_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(monkeypatch, fft=0.1)
    assert trials(30) == 0
    with mucudnn.patched(database=":memory:", progress="off") as session:
        functional.conv2d(X, W)
        assert len(session.records()) == 1, "it is decided before the first call"
    assert trials(30, planning="live") > 0, "who asks for live planning gets it"


def test_a_gpus_convolutions_are_explored_only_where_that_is_asked_for() -> None:
    for planning, on_gpu in ("auto", False), ("live", True), ("ahead", False):
        session = Session(Settings.from_environment({}, planning=planning, database=":memory:"), Alone())
        assert session.marks_local_work("cuda") is on_gpu
        assert session.marks_local_work("cpu") is (planning != "ahead")
        session.close()


@pytest.mark.parametrize(
    ("settings", "start"),
    [({"workspace_limit": "peak"}, "budgets by step are"), ({"total_workspace_size": "1MiB"}, "the total is")],
)
def test_that_a_budget_is_one_rank_s_own_is_reported(
    settings: dict[str, str], start: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mucudnn")
    with mucudnn.patched(database=":memory:", board=Alone(), **settings) as session:  # type: ignore[arg-type]
        (notice,) = session.outcome().notices
        assert notice.startswith(start) and "torch's own kernels compute what several ranks compute" in notice
        assert notice in caplog.messages
        assert session.marks_local_work("cpu")
    with mucudnn.patched(database=":memory:", **settings) as session:  # type: ignore[arg-type]
        assert not session.outcome().notices


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(LivePlanning, "serves", lambda planning, device_type: bool(asked.append(device_type)))
    assert trials(30) == 0
    assert set(asked) == {"cpu"}
