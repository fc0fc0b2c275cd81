"""The files of the first rank and of another, in one process: every operation against a folder on the disk."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distconv.files.first_rank import FirstRank
from distconv.files.functions import Functions
from distconv.files.layer import FileLayer
from distconv.files.own_layer import OwnLayer
from distconv.files.view import FileView


class Rank:
    """The file functions of one rank, on paths within a folder."""

    def __init__(self, functions: dict, folder: Path) -> None:
        self._functions, self.folder = functions, folder

    def __call__(self, name: str, path: str, *others, text: bool = False, **named):
        """A function; its paths are within the folder, but for a link's `text`."""
        return self._functions[name](path if text else self._path(path), *map(self._path, others), **named)

    def _path(self, path):
        return str(self.folder / path) if isinstance(path, str) else path

    def write(self, path: str, text: str, flags: int) -> None:
        descriptor = self("open", path, flags=flags | os.O_CREAT, mode=0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def content(self, path: str) -> str:
        descriptor = self("open", path, flags=os.O_RDONLY)
        try:
            return os.read(descriptor, 10000).decode()
        finally:
            os.close(descriptor)

    def tree(self, folder: str = "") -> dict[str, object]:
        """Every path beneath, with what it is."""
        found: dict[str, object] = {}
        with self("scandir", folder) as entries:
            listed = {entry.name: entry for entry in entries}
        assert sorted(listed) == sorted(self("listdir", folder))
        for name, entry in listed.items():
            path = f"{folder}/{name}" if folder else name
            mode = self("lstat", path).st_mode
            assert (entry.is_symlink(), entry.is_dir(follow_symlinks=False)) == (stat.S_ISLNK(mode), stat.S_ISDIR(mode))
            if stat.S_ISLNK(mode):
                found[path] = "-> " + self("readlink", path)
            elif stat.S_ISDIR(mode):
                found[path] = None
                found.update(self.tree(path))
            else:
                found[path] = self.content(path), stat.S_IMODE(mode)
        return found


REAL = {
    name: getattr(os, name)
    for name in (
        *("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "rename", "replace", "link", "symlink", "truncate"),
        *("listdir", "scandir", "readlink", "access", "utime", "chmod"),
    )
}


def fill(folder: Path) -> None:
    (folder / "a" / "deep").mkdir(parents=True)
    (folder / "b").mkdir()
    (folder / "a" / "x").write_text("old x")
    (folder / "a" / "deep" / "y").write_text("old y")
    (folder / "x").write_text("top")
    (folder / "link").symlink_to("a")


def ranks(job: Path, folder: Path) -> tuple[Rank, Rank]:
    for name in ("before", "shared", "own"):
        (job / name).mkdir(parents=True)
    before, shared, own = (FileLayer(str(job / name)) for name in ("before", "shared", "own"))
    first = Functions(FirstRank(before), shared)
    other = Functions(OwnLayer(FileView(own, before, shared, ("/dev/", "/proc/"))), shared)
    return Rank({**REAL, **first.table()}, folder), Rank(other.table(), folder)


PATHS = st.sampled_from(
    [
        "x",
        "new",
        "a",
        "b",
        "c",
        "a/x",
        "a/new",
        "a/deep",
        "a/deep/y",
        "b/z",
        "c/w",
        "link",
        "link/x",
        "empty",
        "../top/x",
    ]
)
TEXTS = st.text("abc", max_size=3)
FLAGS = st.sampled_from([os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR, os.O_WRONLY | os.O_EXCL])

ACTIONS = st.one_of(
    st.tuples(st.just("write"), PATHS, TEXTS, FLAGS),
    st.tuples(st.sampled_from(["mkdir", "rmdir", "unlink"]), PATHS),
    st.tuples(st.sampled_from(["rename", "link"]), PATHS, PATHS),
    st.tuples(st.just("symlink"), st.sampled_from(["a", "x", "nowhere", "link", "c/w"]), PATHS),
    st.tuples(st.just("truncate"), PATHS, st.integers(0, 4)),
)


def act(rank: Rank, action: tuple) -> object:
    """What became of an action: nothing, or its error."""
    name, path, *others = action
    try:
        if name == "write":
            rank.write(path, *others)
        elif name == "symlink":
            rank("symlink", path, *others, text=True)
        else:
            rank(name, path, *others)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def asked(rank: Rank, path: str) -> object:
    """What a path is, following links."""
    try:
        return stat.S_IFMT(rank("stat", path).st_mode), rank("access", path, mode=os.R_OK)
    except OSError as error:
        return errno.errorcode[error.errno or 0], rank("access", path, mode=os.R_OK)


class TwoRanks(RuleBasedStateMachine):
    """Each rank's view of its folder is that of a plain program that did the same, whatever the other rank did."""

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        top = Path(self._folder.name)
        self.plain = {}
        for name in ("real/top", "plain0/top", "plain1/top"):
            (top / name).mkdir(parents=True)
            fill(top / name)
        self.ranks = ranks(top / "job", top / "real/top")
        self.plain = [Rank(REAL, top / f"plain{rank}/top") for rank in (0, 1)]

    @rule(rank=st.sampled_from([0, 1]), action=ACTIONS)
    def both(self, rank: int, action: tuple) -> None:
        assert act(self.ranks[rank], action) == act(self.plain[rank], action), action

    @rule(rank=st.sampled_from([0, 1]), path=PATHS)
    def ask(self, rank: int, path: str) -> None:
        assert asked(self.ranks[rank], path) == asked(self.plain[rank], path), path

    @invariant()
    def same(self) -> None:
        for rank in (0, 1):
            assert self.ranks[rank].tree() == self.plain[rank].tree()

    def teardown(self) -> None:
        self._folder.cleanup()


TestTwoRanks = TwoRanks.TestCase
TestTwoRanks.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, phases=[Phase.reuse, Phase.generate]
)
