"""Single faults of the database of measured times: it cannot be written, is not ours, or the clock goes wrong.

Each fault is a function of the path of a database that is to be made. It gives a line that says what is wrong, or
nothing where all is as it should be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.faults.database_rows import Row, compared, key, options
from mucudnn.timing.store import Store

NOBODY = 65534

ROW: Row = (0, 1)


def _prepared(path: Path) -> None:
    store = Store(str(path))
    store.record(key(ROW), options(ROW))
    store.close()


def _in_child(action: Callable[[], str]) -> str:
    """What an action says in a process of its own, whose limits and user it may change."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(there, text.encode()[:2000])
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


def _kept_in_memory(path: Path, expected: str, prepare: Callable[[], None]) -> str:
    """One warning, old rows and new ones answered: what is wrong with that, nothing if it is so."""

    def action() -> str:
        prepare()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            store = Store(str(path))
            rows = [(7, count) for count in range(1, 400)]
            for row in rows:
                store.record(key(row), options(row))
            missing = [row for row in [ROW, *rows] if list(store.launches(key(row)).values()) != options(row)]
        lines = [str(each.message) for each in told]
        if missing or len(lines) != 1 or expected not in lines[0] or "\n" in lines[0]:
            return f"{len(missing)} rows are not answered; {len(lines)} warnings {lines[:2]}"
        return ""

    said = _in_child(action)
    if said:
        return said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return "" if list(Store(str(path)).launches(key(ROW)).values()) == options(ROW) else "a committed row is lost"


def full_disk(path: Path) -> str:
    """No file of the process may become larger than 64 KiB."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    _prepared(path)
    return _kept_in_memory(path, "cannot be written", limit)


def full_file_system(path: Path) -> str:
    """A file system of 128 KiB; "not tried" where this process may not mount one."""

    def action() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace, private = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE | MS_REC
        place = str(path.parent).encode()
        if (
            libc.unshare(namespace)
            or libc.mount(None, b"/", None, private, None)
            or libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=128k")
        ):
            return "not tried"
        _prepared(path)
        return _kept_in_memory(path, "cannot be written", lambda: None)

    return _in_child(action)


def read_only(path: Path) -> str:
    """The file and its folder may only be read; by a user who is bound by that."""

    def bound() -> None:
        if os.geteuid() == 0:
            os.seteuid(NOBODY)

    _prepared(path)
    path.parent.chmod(0o555)
    path.chmod(0o444)
    try:
        return _kept_in_memory(path, "cannot be written", bound)
    finally:
        path.parent.chmod(0o755)


def _set_aside(path: Path, reason: str) -> str:
    """The file goes to a new name as it is, with one warning, and rows are kept in a new one."""
    before = path.read_bytes()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _prepared(path)
        answered = list(Store(str(path)).launches(key(ROW)).values()) == options(ROW)
    aside = [other for other in path.parent.iterdir() if ".damaged-" in other.name]
    lines = [str(each.message) for each in told]
    if not answered or [other.read_bytes() for other in aside] != [before]:
        return f"answered: {answered}; set aside: {[other.name for other in aside]}"
    return "" if len(lines) == 1 and reason in lines[0] else f"warnings: {lines}"


def foreign_file(path: Path) -> str:
    """A text file, by another program."""
    path.write_text("a diary\n" * 1000)
    return _set_aside(path, "file is not a database")


def foreign_database(path: Path) -> str:
    """An SQLite database of another program."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE recipes (name TEXT); PRAGMA application_id = 77")
    return _set_aside(path, "another application")


def older_schema(path: Path) -> str:
    """Our own file, of an older version."""
    _prepared(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE IF EXISTS needs; PRAGMA user_version = 1")
    return _set_aside(path, "its format is 1")


def clock_set_back(path: Path) -> str:
    """The wall clock goes back by an hour with every look at it, and the file is of tomorrow."""
    _prepared(path)
    hours = iter(range(10**9))
    with mock.patch("time.time", lambda: 2e9 - 3600 * next(hours)), warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(str(path))
        rows = [(1, count) for count in range(30)]
        for row in rows:
            os.utime(path, (4e9 - 1e6 * row[1], 4e9 - 1e6 * row[1]))
            store.record(key(row), options(row))
        store.close()
    lost, wrong = compared(path, [ROW, *rows], 2)
    return f"{lost} lost, {wrong} wrong" if lost or wrong else ""


FAULTS = {
    "a full disk (a limit on the size of files)": full_disk,
    "a full file system of 128 KiB": full_file_system,
    "file and folder read-only": read_only,
    "a text file in its place": foreign_file,
    "another program's database in its place": foreign_database,
    "an older version of its tables": older_schema,
    "a clock that is set back": clock_set_back,
}
