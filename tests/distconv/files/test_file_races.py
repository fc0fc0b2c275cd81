"""What a rank sees while the first rank changes the same files: what was there at the start, whenever that happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import posix
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distconv.files import first_rank, functions, layer, names, own_layer, view
from tests.distconv.files.test_private_files import Rank, fill, ranks

MODULES = first_rank, functions, layer, names, own_layer, view

Operation = Callable[[Rank], Any]

STRIDE = 7
"""One call of so many is interrupted, another one beside each of `OF_ANOTHER`. With 1 every call is, which takes
minutes."""


class Interrupted:
    """The module `posix`; before one of the calls of an operation another operation is done as a whole."""

    def __init__(self) -> None:
        self.calls, self._at = 0, -1
        self._other: Callable[[], Any] = lambda: None

    def run(self, operation: Callable[[], Any], at: int, other: Callable[[], Any]) -> None:
        """The operation, `other` being done before its call number `at`, if it comes to that."""
        self.calls, self._at, self._other = 0, at, other
        operation()
        self._at = -1

    def __getattr__(self, name: str) -> Any:
        value = getattr(posix, name)
        return self._counted(value) if callable(value) and not isinstance(value, type) else value

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if self._at >= 0:
                self.calls += 1
                if self.calls == self._at + 1:
                    self._at = -1
                    self._other()
            return function(*arguments, **named)

        return called


def remove_all(rank: Rank) -> None:
    for name in "unlink a/deep/y", "rmdir a/deep", "unlink a/x", "rmdir a":
        rank(*name.split())


def replace_link(rank: Rank) -> None:
    rank("unlink", "link")
    rank("symlink", "b", "link", text=True)


def move_with_a_new_file(rank: Rank) -> None:
    rank.write("a/deep/new", "later", os.O_WRONLY)
    rank("rename", "a", "d")


OF_THE_FIRST: dict[str, Operation] = {
    "moves a folder": lambda rank: rank("rename", "a", "d"),
    "moves a folder in which it has made a file": move_with_a_new_file,
    "removes a folder with what is in it": remove_all,
    "removes an empty folder": lambda rank: rank("rmdir", "b"),
    "makes a file": lambda rank: rank.write("a/new", "later", os.O_WRONLY),
    "replaces a file": lambda rank: rank("replace", "x", "a/x"),
    "empties a file": lambda rank: rank.write("a/x", "later", os.O_WRONLY | os.O_TRUNC),
    "replaces a link": replace_link,
}

OF_ANOTHER: dict[str, Operation] = {
    "reads": lambda rank: rank.content("a/x"),
    "reads through a link": lambda rank: rank.content("link/deep/y"),
    "lists": lambda rank: sorted(rank("listdir", "a")),
    "lists a folder beneath": lambda rank: sorted(rank("listdir", "a/deep")),
    "scans": lambda rank: sorted(entry.name for entry in rank("scandir", "a")),
    "asks for a new file": lambda rank: rank("access", "a/new", mode=os.F_OK),
    "asks for a new file beneath": lambda rank: rank("access", "a/deep/new", mode=os.F_OK),
    "moves a folder": lambda rank: rank("rename", "a", "c"),
    "removes a file": lambda rank: rank("unlink", "a/x"),
    "removes an empty folder": lambda rank: rank("rmdir", "b"),
    "adds to a file": lambda rank: rank.write("a/x", "own", os.O_WRONLY | os.O_APPEND),
    "makes a folder": lambda rank: rank("mkdir", "b/new"),
    "links": lambda rank: rank("link", "a/x", "b/x"),
}


class WaitsError(Exception):
    """A rank waits for the first rank."""


def waits(seconds: float) -> None:
    raise WaitsError


def outcome(operation: Operation, rank: Rank) -> Any:
    """What an operation gives, and what the rank sees then."""
    try:
        return operation(rank)
    except OSError as error:
        return error.errno


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    found = Interrupted()
    for module in MODULES:
        monkeypatch.setattr(module, "posix", found)
    monkeypatch.setattr(layer.time, "sleep", waits)
    return found


def fresh(place: Path) -> tuple[Rank, Rank]:
    folder = place / "top"
    folder.mkdir(parents=True)
    fill(folder)
    found = ranks(place / "job", folder)
    for rank in found:
        rank("access", "x", mode=os.F_OK)  # from now on the folders above are known: fewer calls to interrupt
    return found


@pytest.mark.parametrize("is_first_interrupted", [True, False], ids=["first interrupted", "other interrupted"])
@pytest.mark.parametrize("change", OF_THE_FIRST)
def test_a_rank_sees_what_was_there_at_the_start(
    change: str, is_first_interrupted: bool, interrupted: Interrupted, tmp_path: Path
) -> None:
    places = (tmp_path / str(number) for number in itertools.count())
    for number, (name, operation) in enumerate(OF_ANOTHER.items()):
        _, alone = fresh(next(places))
        expected = outcome(operation, alone), alone.tree()
        for at in itertools.count(number % STRIDE, STRIDE):
            first, other = fresh(next(places))
            seen: list[Any] = []

            def by_other(rank: Rank = other, seen: list[Any] = seen, operation: Operation = operation) -> None:
                seen.append(outcome(operation, rank))

            def by_first(rank: Rank = first) -> None:
                OF_THE_FIRST[change](rank)

            with contextlib.suppress(WaitsError):
                if is_first_interrupted:
                    interrupted.run(by_first, at, by_other)
                else:
                    interrupted.run(by_other, at, by_first)
                if interrupted.calls <= at:
                    break
                assert (*seen, other.tree()) == expected, f"{name}, interrupted before call {at}"


class Shared:
    """Mapped memory; while one process uses it, another one changes the layer."""

    def __init__(self, memory: memoryview, other: Callable[[], Any]) -> None:
        self._memory, self._other, self._is_alone = memory, other, False

    def __getitem__(self, at: int) -> int:
        value = self._memory[at]
        self._meanwhile()
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self._meanwhile()
        self._memory[at] = value

    def _meanwhile(self) -> None:
        if not self._is_alone:
            self._is_alone = True
            self._other()


def test_changes_of_two_processes_at_once_are_two(tmp_path):
    one, other = layer.FileLayer(str(tmp_path / "layer")), layer.FileLayer(str(tmp_path / "layer"))
    (name,) = [name for name, value in vars(one).items() if isinstance(value, memoryview)]
    seen: list[int] = [other.changes]

    def change() -> None:
        other.changed()
        seen.append(other.changes)

    memory = getattr(one, name)
    setattr(one, name, Shared(memory, change))
    one.changed()
    setattr(one, name, memory)
    assert len({*seen, one.changes}) == 3
