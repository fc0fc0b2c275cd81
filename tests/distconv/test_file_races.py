"""What a rank sees while the first rank changes the same files: whenever that happens, what was there at the start."""

from __future__ import annotations

import itertools
import os
import posix
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_private_files import Rank, fill, ranks

from distconv.job.files import first_rank, functions, layer, names, own_layer, view

MODULES = first_rank, functions, layer, names, own_layer, view

Operation = Callable[[Rank], Any]


class Interrupted:
    """The module `posix`; before one of the calls of an operation another operation is done as a whole."""

    def __init__(self) -> None:
        self.calls, self._at, self._other = 0, -1, lambda: None
        self._is_interrupted = False

    def run(self, operation: Callable[[], Any], at: int, other: Callable[[], Any]) -> Any:
        """The operation's result, `other` being done before its call number `at`, if it comes to that."""
        self.calls, self._at, self._other = 0, at, other
        try:
            return operation()
        finally:
            self._at = -1

    def __getattr__(self, name: str) -> Any:
        value = getattr(posix, name)
        return self._counted(value) if callable(value) and not isinstance(value, type) else value

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if not self._is_interrupted and self._at >= 0:
                if self.calls == self._at:
                    self._is_interrupted = True
                    try:
                        self._other()
                    finally:
                        self._is_interrupted = False
                self.calls += 1
            return function(*arguments, **named)

        return called


def removed(rank: Rank) -> None:
    for name in "unlink a/deep/y", "rmdir a/deep", "unlink a/x", "rmdir a":
        rank(*name.split())


def replaced_link(rank: Rank) -> None:
    rank("unlink", "link")
    rank("symlink", "b", "link", text=True)


def moved_with_a_new_file(rank: Rank) -> None:
    rank.write("a/deep/new", "later", os.O_WRONLY)
    rank("rename", "a", "d")


WRITES: dict[str, Operation] = {
    "moves a folder": lambda rank: rank("rename", "a", "d"),
    "moves a folder in which it has made a file": moved_with_a_new_file,
    "removes a folder with what is in it": removed,
    "removes a file": lambda rank: rank("unlink", "a/x"),
    "removes an empty folder": lambda rank: rank("rmdir", "b"),
    "makes a file": lambda rank: rank.write("a/new", "later", os.O_WRONLY),
    "makes a folder": lambda rank: rank("mkdir", "new"),
    "replaces a file": lambda rank: rank("replace", "x", "a/x"),
    "empties a file": lambda rank: rank.write("a/x", "later", os.O_WRONLY | os.O_TRUNC),
    "replaces a link": replaced_link,
}

READS: dict[str, Operation] = {
    "reads": lambda rank: rank.content("a/x"),
    "reads through a link": lambda rank: rank.content("link/deep/y"),
    "lists": lambda rank: sorted(rank("listdir", "a")),
    "scans": lambda rank: sorted(entry.name for entry in rank("scandir", "a")),
    "looks for what is not there": lambda rank: rank("access", "a/new", os.F_OK) or rank("access", "a/deep/new", os.F_OK),
    "moves a folder": lambda rank: rank("rename", "a", "c"),
    "removes a file": lambda rank: rank("unlink", "a/x"),
    "removes an empty folder": lambda rank: rank("rmdir", "b"),
    "adds to a file": lambda rank: rank.write("a/x", "own", os.O_WRONLY | os.O_APPEND),
    "makes a file": lambda rank: rank.write("a/new", "own", os.O_WRONLY),
    "makes a folder": lambda rank: rank("mkdir", "b/new"),
    "changes a mode": lambda rank: rank("chmod", "a/x", mode=0o600),
    "links": lambda rank: rank("link", "a/x", "b/x"),
}


def outcome(operation: Operation, rank: Rank) -> Any:
    """What an operation gives, and what the rank sees then."""
    try:
        found = operation(rank)
    except OSError as error:
        found = error.errno
    return found


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    found = Interrupted()
    for module in MODULES:
        monkeypatch.setattr(module, "posix", found)
    return found


def fresh(place: Path) -> tuple[Rank, Rank]:
    folder = place / "top"
    folder.mkdir(parents=True)
    fill(folder)
    return ranks(place / "job", folder)


@pytest.mark.parametrize("write", WRITES)
def test_a_rank_sees_what_was_there_at_the_start(write: str, interrupted: Interrupted, tmp_path: Path) -> None:
    places = (tmp_path / str(number) for number in itertools.count())
    wrong = []
    for read, reading in READS.items():
        _, alone = fresh(next(places))
        expected = outcome(reading, alone), alone.tree()
        for is_first in (True, False):
            for at in itertools.count():
                first, other = fresh(next(places))
                seen: list[Any] = []
                def by_other():
                    seen.append(outcome(reading, other))
                def by_first():
                    WRITES[write](first)
                if is_first:
                    interrupted.run(by_first, at, by_other)
                else:
                    interrupted.run(by_other, at, by_first)
                if at >= interrupted.calls:
                    break
                if (seen[0], other.tree()) != expected:
                    wrong.append((read, is_first, at, seen[0], expected[0], other.tree()==expected[1]))
    assert not wrong, "\n".join(map(str, wrong))
