"""Lines for a user."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from mucudnn.process import print_line


def test_a_line_has_a_line_of_its_own_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    with tqdm(total=2) as bar:
        bar.update()
        print_line("a line")
        bar.update()
    assert "\ra line\n" in shown.getvalue() and "100%" in shown.getvalue()
