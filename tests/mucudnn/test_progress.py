"""The progress bar."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mucudnn.timing import progress


def test_a_bar_counts_in_nests_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar(100, "outer", "on") as advance, progress.bar(1, "inner", "on") as inner:
        inner()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: advance(), range(100)))
    err = capsys.readouterr().err
    assert "outer" in err and "inner" in err


@pytest.mark.parametrize(
    ("mode", "terminal", "shown"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_a_bar_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str, terminal: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.bar(2, "measuring", mode) as advance:
        advance()
    assert ("measuring" in capsys.readouterr().err) is shown


def test_a_bar_without_an_end_shows_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar(None, "whole steps", "on"):
        pass
    assert "whole steps 00:00" in capsys.readouterr().err
