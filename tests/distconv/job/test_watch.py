"""What a watcher does, with ranks that only play their part."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from distconv.job import watch
from distconv.job.ending import Ending, lost_another
from distconv.job.notices import Notices
from distconv.job.signals import Signals
from distconv.job.watch import Watch


@pytest.fixture(autouse=True)
def nothing_else_is_ended(monkeypatch):
    """What descends from this process here are ranks and servers of other tests."""
    monkeypatch.setattr(watch, "end_descendants", lambda: None)


class Rank:
    """Ends as `script` says: its code at the n-th look, None while it runs. SIGTERM and SIGKILL are obeyed."""

    pid = 0

    def __init__(self, script: Callable[[int], int | None], deaf: bool = False) -> None:
        self._script, self._deaf, self._looks = script, deaf, 0
        self.received: list[int] = []

    def poll(self) -> int | None:
        self._looks += 1
        if signal.SIGKILL in self.received:
            return -signal.SIGKILL
        if signal.SIGTERM in self.received and not self._deaf:
            return -signal.SIGTERM
        return self._script(self._looks)

    def send_signal(self, sig: int) -> None:
        self.received.append(sig)


def runs(look: int) -> None:
    """Until it is told to end."""


def ends(code: int, at: int = 2) -> Callable[[int], int | None]:
    return lambda look: code if look >= at else None


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("SAME_ERROR_SECONDS", "STOP_SECONDS", "_POLL_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(watch, name, 0.02)


def watched(*ranks: Rank, notices: Notices | None = None) -> int:
    notices = notices or Notices(dist.HashStore(), len(ranks))
    return Watch(dict(enumerate(ranks)), len(ranks), lambda: notices, {}).run()


def test_all_end_well(capsys):
    assert watched(Rank(ends(0)), Rank(ends(0, at=9))) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_death_ends_the_others(capsys, deaf):
    other = Rank(runs, deaf)
    assert watched(other, Rank(ends(-9))) == 137
    assert capsys.readouterr().err == "distconv: rank 1 of 2 was killed (signal 9)\n"
    assert (signal.SIGKILL in other.received) == deaf


class SignalledMeanwhile(Notices):
    """Another watcher is signalled, and its rank dies of that, while this one looks around."""

    def is_signalled(self) -> bool:
        before = super().is_signalled()
        self.signalled()
        self.record(1, -signal.SIGTERM)
        return before


def test_a_rank_that_a_signal_has_ended_is_no_news(capsys):
    notices = SignalledMeanwhile(dist.HashStore(), 2)
    assert Watch({0: Rank(ends(0, at=9))}, 2, lambda: notices, {}).run() == 0
    assert capsys.readouterr().err == ""


def test_of_two_deaths_the_first_is_reported(capsys):
    assert watched(Rank(ends(-6, at=4)), Rank(ends(-9))) == 137
    assert capsys.readouterr().err == "distconv: rank 1 of 2 was killed (signal 9)\n"


def test_ranks_that_all_fail_are_left_to_do_so(capsys, monkeypatch):
    monkeypatch.setattr(watch, "SAME_ERROR_SECONDS", 60.0)
    first = Rank(ends(7, at=5))
    assert watched(first, Rank(ends(7))) == 7
    assert capsys.readouterr().err == "" and first.received == []


def test_a_rank_that_fails_alone_is_reported_unless_it_did_so_itself(capsys):
    assert watched(Rank(runs), Rank(ends(7))) == 7
    assert capsys.readouterr().err == "distconv: rank 1 of 2 ended with exit code 7 while others were still running\n"
    notices = Notices(dist.HashStore(), 2)
    assert notices.claim()
    assert watched(Rank(runs), Rank(ends(7)), notices=notices) == 7
    assert capsys.readouterr().err == ""


def test_a_rank_elsewhere_that_fails_ends_this_one(capsys):
    notices = Notices(dist.HashStore(), 2)
    notices.record(1, -9)
    here = Rank(runs)
    assert Watch({0: here}, 2, lambda: notices, {}).run() == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "distconv: rank 1 of 2 was killed (signal 9)\n"


def test_the_code_of_a_rank_that_was_stopped_while_it_ended_is_its_own():
    notices = Notices(dist.HashStore(), 2)
    notices.record(0, 2)
    assert watched(Rank(runs), Rank(ends(2)), notices=notices) == 2
    assert dict(notices.endings()) == {0: 2, 1: 2}


@pytest.mark.parametrize(("own", "code"), [(None, 143), (5, 5), (0, 0)])
def test_a_signal_is_passed_on_once_and_the_scripts_code_counts(capsys, own, code):
    def received(look: int) -> int | None:
        if look == 3:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return own if look > 6 else None

    ranks = Rank(received, deaf=own is not None), Rank(lambda look: own if look > 6 else None, deaf=own is not None)
    assert watched(*ranks) == code
    assert capsys.readouterr().err == "distconv: ended by SIGTERM\n"
    assert ranks[1].received == [signal.SIGTERM]


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert signals.taken() == [signal.SIGUSR1] and signals.taken() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_right_to_tell_is_claimed_once_and_a_lost_store_is_no_error():
    notices = Notices(dist.HashStore(), 2)
    assert not notices.reported() and [notices.claim(), notices.claim()] == [True, False] and notices.reported()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = Notices(dist.TCPStore("127.0.0.1", server.port, is_master=False), 2)
    client.record(1, 3)
    assert client.endings() == {1: 3}
    del server
    assert not client.claim() and client.endings() == {}


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:6389", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was a network error", True),
        ("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x5)", False),
        ("no luck", False),
    ],
)
def test_a_consequence_is_distinguished_from_a_cause(text, lost):
    assert lost_another(RuntimeError(text)) == lost
    wrapped = ValueError("step 3 failed")
    wrapped.__cause__ = RuntimeError(text)
    assert lost_another(wrapped) == lost


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ended, code", [(7, 7), (-9, 137), (0, 1)])
def test_a_rank_that_lost_another_ends_as_that_one_did(ended, code, told, monkeypatch):
    """Whether or not a third one has told of it."""
    monkeypatch.setattr("distconv.job.ending.FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ending = Ending(0, shown := io.StringIO())
    ending.notices = Notices(dist.HashStore(), 3)
    ending.notices.record(1, ended)
    if told:
        ending.notices.claim()
    ending.explain(RuntimeError("Connection closed by peer"))
    assert ending.code == code
    assert shown.getvalue() == "" if told else shown.getvalue().startswith("distconv: rank 1 of 3 ")
