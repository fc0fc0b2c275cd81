"""Absence: the steps of training in which torch's own kernels are called without a way through Python."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import mucudnn
from mucudnn.runtime import shim
from mucudnn.runtime.absence import Absence
from mucudnn.runtime.session import Session
from mucudnn.runtime.watched import Watched


class _Resting:
    def __init__(self) -> None:
        self.rest = 15

    def run(self, call: Any) -> None:
        return None

    def records(self) -> list[Any]:
        return []


def _always() -> bool:
    return True


def test_steps_are_left_out_by_ever_more_and_count_as_calls() -> None:
    layer, other = _Resting(), _Resting()
    absence = Absence({"layer": layer, "another shape": other, "left for good": None}, True)
    out, looks = [], 0
    for _ in range(60):
        if not absence.is_out:
            absence.threads.add(get_ident())
            looks += layer.rest <= 0
            layer.rest = layer.rest - 1 if layer.rest > 0 else 15
        absence.step(_always)
        out.append(absence.is_out)
    lengths = [len(run) for run in "".join(".o"[is_out] for is_out in out).split(".") if run]
    assert lengths == [1, 3, 7, 15, 15, 13]
    assert other.rest == 15, "a shape that was not called has not earned a trial"
    assert looks == 3, "the steps without the kernels count as calls: a look is due after every 16"
    assert absence.notices() == [
        f"in {absence.without} of 60 steps of optimizers torch called its own kernels directly, as these had computed "
        "all convolutions of the steps before"
    ]


@pytest.mark.parametrize("reason", ["busy", "a limit", "another thread", "not now", "no call"])
def test_nothing_is_left_out(reason: str) -> None:
    absence = Absence({"layer": _Resting()}, reason != "a limit")
    for _ in range(20):
        if reason != "no call":
            absence.threads.add(get_ident())
        if reason == "another thread":
            absence.threads.add(-1)
        absence.is_busy = reason == "busy"
        absence.step(lambda: reason != "not now")
        assert not absence.is_out


def _step(model: nn.Module, x: torch.Tensor) -> None:
    """A step without an optimizer, whose constructor would import a compiler."""
    model.zero_grad()
    model(x).square().mean().backward()
    for hook in _hooks():
        hook(None, (), {})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the threads that run these tests."""
    own = sys._current_frames
    before = own().keys() - {get_ident()}
    monkeypatch.setattr(sys, "_current_frames", lambda: {k: frame for k, frame in own().items() if k not in before})


def _until(wanted: Callable[[], bool], step: Callable[[], None]) -> None:
    for _ in range(40):
        if wanted():
            return
        step()
    raise AssertionError("it never came")


def _is_out() -> bool:
    return shim._library is None


@pytest.mark.usefixtures("alone")
def test_a_network_with_nothing_to_gain_is_left_to_torch() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    train, names = nn.Module.train, ("aten::convolution", "aten::convolution_backward")
    before = [torch._C._dispatch_dump(name) for name in names]
    with mucudnn.patched(planning="live", database=":memory:") as session:
        _until(_is_out, lambda: _step(model, x))
        assert [torch._C._dispatch_dump(name) for name in names] == before
        assert mucudnn.is_patched() and session.outcome().notices == []

        known = len(session.decisions)
        model.eval()
        assert not _is_out(), "other shapes may come"
        for _ in range(2):
            model(torch.randn(1, 3, 20, 20))
        assert len(session.decisions) == known + 1
        model.train()

        for _ in range(40):  # new shapes are found in training, too
            _step(model, x[:1])
        assert len(session.decisions) == known + 3 and session.absence.without > 20

        assert len(session.outcome().notices) == 1

        _until(lambda: not _is_out(), lambda: _step(model, x))
        go, seen = threading.Event(), threading.Event()

        def busy() -> None:
            seen.set()
            while not go.is_set():
                time.sleep(1e-3)

        thread = threading.Thread(target=busy)
        thread.start()
        seen.wait()
        for _ in range(20):
            _step(model, x)
            assert not _is_out(), "a thread that computes may be about to convolve"
        go.set()
        thread.join()
        _until(_is_out, lambda: _step(model, x))
    assert [torch._C._dispatch_dump(name) for name in names] == before
    assert nn.Module.train is train and not _hooks()


def _hooks() -> list[Any]:
    return [hook for hook in _global_optimizer_post_hooks.values() if hook.__module__.startswith("mucudnn")]


@pytest.mark.parametrize("settings", [{"workspace_limit": "64MiB"}, {"planning": "ahead"}])
def test_a_limit_is_kept_in_every_step(settings: dict[str, str]) -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    with mucudnn.patched(**{"planning": "live", "database": ":memory:", **settings}):  # type: ignore[arg-type]
        for _ in range(10):
            _step(model, x)
            assert not _is_out()


@pytest.mark.usefixtures("alone")
def test_what_is_found_after_an_absence_computes_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A division that turns out faster ends all absences."""
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    with mucudnn.patched(planning="live", database=":memory:") as session:
        _until(_is_out, lambda: _step(model, x))
        found = torch.randn(2, 4, 7, 7)
        monkeypatch.setattr(Watched, "run", lambda self, call: found if call.grad_output is None else None)
        monkeypatch.setattr(Session, "awaits", lambda *_: False)
        session.decisions.clear()
        _until(lambda: not _is_out(), lambda: _step(model, x))
        for _ in range(20):
            _step(model, x)
            assert not _is_out()
