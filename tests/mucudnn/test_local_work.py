"""Own work: convolutions that no other process computes too."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from boards import Alone
from made_up_clock import MadeUp
from torch.nn import functional

import mucudnn
from mucudnn.devices import Host
from mucudnn.runtime.decision import LocalWork, is_local_work

X, W = torch.randn(8, 3, 12, 12), torch.randn(5, 3, 5, 5)


@pytest.fixture
def fast_fft(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(monkeypatch, fft=0.1)


@pytest.mark.usefixtures("fast_fft")
def test_on_several_ranks_local_work_alone_is_explored() -> None:
    with mucudnn.patched(planning="live", database=":memory:", board=Alone()) as session:
        for _ in range(100):
            functional.conv2d(X, W)
        assert [(record.trials, record.tries) for record in session.records()] == [(0, ())]
        for _ in range(100):
            with LocalWork():
                functional.conv2d(X[1:], W)  # the other is planned
        own = [record for record in session.records() if record.trials]
        assert len(own) == 1 and {algorithm for _, algorithm in own[0].parts} == {"fft"}


@pytest.mark.usefixtures("fast_fft")
def test_nothing_is_measured_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with mucudnn.patched(planning="live", database=":memory:", board=Alone()) as session:
        with LocalWork():
            functional.conv2d(X, W)
        with monkeypatch.context() as capture:
            capture.setattr(Host, "is_capturing", lambda device: True)
            functional.conv2d(X, W)
        assert session.records() == []
        functional.conv2d(X, W)
        assert len(session.records()) == 1


def test_work_is_marked_as_own_in_one_thread_and_until_its_end() -> None:
    elsewhere = []
    with contextlib.suppress(KeyError), LocalWork():
        with LocalWork():
            assert is_local_work()
        assert is_local_work()
        thread = threading.Thread(target=lambda: elsewhere.append(is_local_work()))
        thread.start()
        thread.join()
        raise KeyError
    assert elsewhere == [False] and not is_local_work()
