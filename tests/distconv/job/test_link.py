"""Machines that fall silent."""

from __future__ import annotations

import os
import queue
import signal
import time

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from distconv import settings
from distconv.job.link import Beats, MachineLink
from distconv.place.addresses import listening_store

SECONDS = 3.0


def test_a_machine_that_does_not_beat_is_silent_and_one_that_ended_is_not() -> None:
    store = HashStore()
    first, second, third = (Beats(store, 8.0) for _ in range(3))
    for rank, beats in ((0, first), (2, second), (4, third)):
        beats.join(rank)
    assert first.silent(100.0) is None
    second.beat(), third.end()
    assert first.silent(107.0) is None
    assert first.silent(114.0) is not None
    second.beat()
    first.beat()
    assert first.silent(115.0) is None
    first.beat()
    assert first.silent(122.0) is None
    first.beat()
    found = first.silent(124.0)
    assert found is not None and found[0] == 2


def test_a_machine_that_joins_late_has_its_time() -> None:
    store = HashStore()
    first, late = Beats(store, 8.0), Beats(store, 8.0)
    first.join(0)
    assert first.silent(0.0) is None
    late.join(2)
    first.beat()
    assert first.silent(20.0) is None


def test_a_store_that_does_not_answer_cuts_off() -> None:
    """The process that holds it is stopped, which the network does not tell either."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        held = listening_store("127.0.0.1", 0)
        os.write(writing, str(held.port).encode())
        time.sleep(120)
        os._exit(0)
    told: queue.Queue[str] = queue.Queue()
    try:
        port = int(os.read(reading, 100))
        link = MachineLink(
            lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
            rank=2,
            first=True,
            seconds=SECONDS,
            silent=lambda rank, line: told.put(f"silent: {line}"),
            cut_off=lambda line: told.put(f"cut off: {line}"),
        )
        with pytest.raises(queue.Empty):
            told.get(timeout=SECONDS + 1)
        os.kill(holder, signal.SIGSTOP)
        assert told.get(timeout=60).startswith("cut off: rank 0's machine has not answered")
        link.close()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


@pytest.mark.parametrize("given", ["0", "soon", "-3", "inf"])
def test_how_long_a_machine_may_be_silent(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCONV_LOST_AFTER", given)
    with pytest.raises(
        settings.SettingError, match=r"LOST_AFTER=.*: accepted is a number of seconds, at least 1, or never"
    ):
        settings.value("lost_after")
    monkeypatch.delenv("DISTCONV_LOST_AFTER")
    assert settings.value("lost_after") == 8.0
    monkeypatch.setenv("DISTCONV_LOST_AFTER", "never")
    assert settings.value("lost_after") == float("inf")
