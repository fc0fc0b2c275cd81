"""`distconv.shutdown` and the end of `distconv.patched`: torch is as it was before."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from jobs import ROOT, SCRIPTS

import distconv
from distconv.tensors import hooks
from tests.forked_python import run_python

PAGE = (ROOT / "docs" / "replaced.md").read_text()


@cache
def lines() -> list[str]:
    done = run_python(SCRIPTS / "shut_down.py")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_replaced_attribute_is_put_back() -> None:
    assert lines()[:-1] == []


def test_the_page_lists_what_is_replaced() -> None:
    rows = re.findall(r"^\| ((?:`torch[\w.]*`(?:, )?)+) \|", PAGE, re.M)
    listed = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    replaced = {f"{owner}.{name}" for owner, name in json.loads(lines()[-1])}
    assert replaced <= listed, replaced - listed


def test_not_within_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "scripts", [None])
    with pytest.raises(RuntimeError, match="accepted: after it"):
        distconv.shutdown()
