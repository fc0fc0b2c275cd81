"""When torch's workspaces for cuBLAS are released: not while another thread may be about to use one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from distconv.turns.baton import Baton
from distconv.turns.parts import release_workspaces


def computes(end: threading.Event) -> None:
    while not end.is_set():
        time.sleep(0.001)


def waits_for_its_turn(end: threading.Event) -> None:
    baton = Baton(1, lambda part: None, lambda part: None)

    def runs() -> None:
        end.wait()
        baton.run()

    other = threading.Thread(target=runs)
    other.start()
    baton.start(0)
    baton.end(0, None)
    other.join()


@pytest.mark.parametrize(
    "wait, is_released", [(threading.Event.wait, True), (waits_for_its_turn, True), (computes, False)]
)
def test_they_are_kept_while_another_thread_computes(
    wait: Callable[[threading.Event], object], is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: released.append(True), raising=False)
    end = threading.Event()
    other = threading.Thread(target=wait, args=(end,))
    other.start()
    assert other.ident is not None
    of_threads, seen = sys._current_frames, (threading.get_ident(), other.ident)  # not those of the test runner
    monkeypatch.setattr(sys, "_current_frames", lambda: {at: of_threads()[at] for at in seen})
    time.sleep(0.1)
    release_workspaces()
    end.set()
    other.join()
    assert bool(released) is is_released
