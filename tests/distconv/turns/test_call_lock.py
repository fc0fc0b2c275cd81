"""Threads of a program that call one model at the same time, in parts and whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.turns import call_lock
from distconv.turns.call_lock import CallLock


def together(*works: Callable[[], Any]) -> list[Any]:
    """The results of functions that run in threads at the same time."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        found[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads), "they wait for each other"
    return found


class Masked(nn.Module):
    """Keeps a mask of its input's size, of which each part has its own piece meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)))
        self.mask = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.mask.shape != x.shape[-2:]:
            self.mask = torch.linspace(0, 1, x.shape[-2])[:, None].expand(x.shape[-2:]).clone()
        return self.convolutions(x) * self.mask


@pytest.mark.parametrize("way", ["height=4", "300KiB"])
def test_a_model_that_threads_call_gives_each_its_result(way: str) -> None:
    torch.manual_seed(0)
    model = Masked().double().eval()
    inputs = [torch.randn(1, 2, size, 32).double() for size in (16, 96, 96, 16)]
    with torch.no_grad():
        expected = [Masked.forward(model, x) for x in inputs]
    model.mask = torch.zeros(())
    if way.endswith("KiB"):
        distconv.fit(model, way)
    else:
        distconv.in_turn(model, way)

    def called(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [model(x) for _ in range(4)]

    for results, wanted in zip(together(*(lambda x=x: called(x) for x in inputs)), expected, strict=True):
        for each in results:
            torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)


def test_who_has_taken_the_lock_is_alone() -> None:
    lock, running, seen = CallLock(), list[int](), set[tuple[int, ...]]()

    def work(kind: int) -> bool:
        for _ in range(200):
            with (lock.shared, lock.taken)[kind](), (lock.shared, lock.taken)[kind]():  # it does not wait for itself
                running.append(kind)
                time.sleep(0)
                seen.add(tuple(running))
                running.remove(kind)
        return True

    assert together(*(lambda kind=kind: work(kind) for kind in (0, 1, 0, 1))) == [True] * 4
    assert seen <= {(0,), (1,), (0, 0)}


def test_a_thread_that_another_one_waits_for_goes_on_in_the_end() -> None:
    lock = CallLock()

    def follow() -> bool:
        with lock.taken(0.1), lock.taken():
            return True

    with lock.shared():
        assert together(follow, follow) == [True, True]
    with lock.taken(), lock.taken(0.1), lock.shared():
        pass
    with lock.taken():
        pass


def test_a_thread_says_that_it_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_lock, "LONG", 0.05)
    lock, said = CallLock(), threading.Event()
    monkeypatch.setattr(call_lock, "print_line", lambda line: said.set())

    def take() -> bool:
        with lock.taken():
            return True

    def call() -> bool:
        with lock.shared():
            return said.wait(20)

    assert together(call, lambda: bool(time.sleep(0.02)) or take()) == [True, True]
