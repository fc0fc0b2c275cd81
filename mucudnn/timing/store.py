"""Store: the SQLite database of measured times, shared by threads, by processes and by runs.

A row is one launch: an algorithm at an extent, its seconds and its workspace. Limits and batch sizes are no part of
it, so any limit and any batch size can be answered from the same rows.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mucudnn.optimizer import Option
from mucudnn.settings import MEMORY

_APPLICATION = 0x6D754344  # "muCD"
_VERSION = 1
_SCHEMA = (
    "CREATE TABLE problems (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE)",
    """CREATE TABLE launches (
        problem INTEGER NOT NULL REFERENCES problems (id),
        algorithm TEXT NOT NULL,
        extent INTEGER NOT NULL CHECK (extent >= 1),
        seconds REAL NOT NULL CHECK (seconds >= 0),
        workspace INTEGER NOT NULL CHECK (workspace >= 0),
        PRIMARY KEY (problem, algorithm, extent)
    ) WITHOUT ROWID""",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)
_SIDECARS = ("-journal", "-wal", "-shm")
_DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}

Launches = dict[tuple[str, int], Option]
Result = TypeVar("Result")


class Counts(NamedTuple):
    """How much a store holds."""

    problems: int
    launches: int


class _Damaged(Exception):
    """The file is no database of ours, or no longer."""


class Store:
    """Measured launches by key.

    A key is a dict of plain values that says everything that changes a launch's time, except its algorithm and extent.

    A file that is damaged or belongs to something else is set aside under a new name. Where the file cannot be
    written, its rows still answer and new ones live in this process only. Each is told in one warning. What is recorded
    is on the file before `record` returns.

    Attributes:
        path: of the file, absolute, or `:memory:`.
        patience: seconds to wait for other processes that are writing.
    """

    def __init__(self, path: str, patience: float = 30.0) -> None:
        self.path = path if path == MEMORY else os.path.abspath(path)
        self.patience = patience
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._readable = path != MEMORY
        self._writable = path != MEMORY
        self._memory: dict[str, Launches] = {}
        _stores.add(self)

    @property
    def persistent(self) -> bool:
        """Whether new rows go to the file; False for `:memory:` and after a failure to write."""
        return self._writable

    def launches(self, key: Mapping[str, Any]) -> Launches:
        """Everything measured for the key, by (algorithm, extent)."""
        text = _canonical(key)
        with self._lock:
            found = self._read(lambda connection: _select(connection, text)) or {}
            return found | self._memory.get(text, {})

    def record(self, key: Mapping[str, Any], options: Iterable[Option]) -> None:
        """Adds launches of the key, replacing those of the same algorithm and extent."""
        text, rows = _canonical(key), list(options)
        with self._lock:
            if not (self._writable and self._write(text, rows)):
                self._memory.setdefault(text, {}).update({(row.algorithm, row.extent): row for row in rows})

    def contents(self) -> list[tuple[dict[str, Any], list[Option]]]:
        """Every key with its launches, keys in the order in which they were first recorded."""
        with self._lock:
            found = self._read(_select_all) or {}
            for text, launches in self._memory.items():
                found[text] = found.get(text, {}) | launches
        return [(json.loads(text), list(launches.values())) for text, launches in found.items()]

    def counts(self) -> Counts:
        """How many keys and launches there are."""
        contents = self.contents()
        return Counts(len(contents), sum(len(launches) for _, launches in contents))

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        with self._lock:
            self._disconnect()

    def _read(self, query: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """The query's answer from the file, `None` where there is no readable file."""
        if not self._readable:
            return None
        try:
            return self._attempt(query)
        except (sqlite3.Error, OSError, _Damaged) as error:
            self._readable = self._writable = False
            self._disconnect()
            self._warn(f"cannot be used ({error}); times are kept in memory")
            return None

    def _write(self, key: str, options: list[Option]) -> bool:
        """Whether the rows are on the file."""
        try:
            self._attempt(lambda connection: _insert(connection, key, options))
        except (sqlite3.Error, OSError, _Damaged) as error:
            self._writable = False
            self._warn(f"cannot be written ({error}); new times are kept in memory")
            return False
        return True

    def _attempt(self, action: Callable[[sqlite3.Connection], Result]) -> Result:
        """The action on the open file, once more on a fresh one if the file turns out to be damaged."""
        try:
            return _told(action, self._connected())
        except _Damaged as damage:
            self._disconnect()
            try:
                self._set_aside()
            except (sqlite3.Error, OSError) as error:
                raise _Damaged(f"{damage}; it cannot be renamed: {error}") from error
            return _told(action, self._connected())

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            connection = _connect(self.path, self.patience)
            try:
                _told(_prepare, connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _set_aside(self) -> None:
        """Gives the damaged file another name, unless another process has done so since it was found damaged."""
        with _alone(f"{self.path}.lock", self.patience):
            try:
                self._connected()
                _told(_check, self._connected())
                return
            except _Damaged as damage:
                self._disconnect()
                reason = damage
            number = 1
            while os.path.lexists(new := f"{self.path}.damaged-{number}"):
                number += 1
            # Sidecars first: a journal left behind would be rolled back into the fresh file.
            for suffix in _SIDECARS:
                if os.path.lexists(self.path + suffix):
                    os.rename(self.path + suffix, new + suffix)
            os.rename(self.path, new)
        self._warn(f"is not usable ({reason}); it was renamed to {new} and measuring starts afresh")

    def _warn(self, what: str) -> None:
        line = " ".join(f"mucudnn: the database {self.path} {what}".split())
        warnings.warn(line, RuntimeWarning, stacklevel=2)

    def _forked(self) -> None:
        # SQLite forbids even closing a connection that came through a fork, and a thread that did not come through may
        # hold the lock.
        _orphans.append(self._connection)
        self._connection = None
        self._lock = threading.Lock()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_orphans: list[sqlite3.Connection | None] = []


def _after_fork() -> None:
    for store in list(_stores):
        store._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _connect(path: str, patience: float) -> sqlite3.Connection:
    # The rollback journal stays, as a write-ahead log needs memory shared by all users, which a home directory on a
    # network does not give, and a writable directory even to read.
    return sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)


def _told(action: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
    """The action's result; errors that mean a damaged file raise `_Damaged`."""
    try:
        return action(connection)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF in _DAMAGE:
            raise _Damaged(str(error)) from error
        raise


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _alone(path: str, patience: float) -> Iterator[None]:
    """One process at a time, until it leaves or dies. The empty file stays, as removing it would race."""
    with closing(sqlite3.connect(path, timeout=patience, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


def _prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables of an empty file; raises `_Damaged` for a file of another kind."""
    # What is committed survives the process. Waiting for the disk as well, at every launch that is timed, would only
    # guard against a crash of the whole machine.
    connection.execute("PRAGMA synchronous = OFF")
    if _is_empty(connection):
        with _transaction(connection):
            if _is_empty(connection):
                for statement in _SCHEMA:
                    connection.execute(statement)
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise _Damaged("it is a database of another application")
    if version != _VERSION:
        raise _Damaged(f"its format is {version}, here it is {_VERSION}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def _check(connection: sqlite3.Connection) -> None:
    """Reads every page, as what was found damaged may lie anywhere."""
    (answer, *_) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if answer != "ok":
        raise _Damaged(answer)
    _select_all(connection)


def _option(extent: int, algorithm: str, seconds: float, workspace: int) -> Option:
    try:
        return Option(extent, algorithm, seconds, workspace)
    except (ValueError, TypeError) as error:
        raise _Damaged(str(error)) from error


def _select(connection: sqlite3.Connection, key: str) -> Launches:
    rows = connection.execute(
        "SELECT extent, algorithm, seconds, workspace FROM launches JOIN problems ON problem = id WHERE key = ?", (key,)
    )
    return {(row[1], row[0]): _option(*row) for row in rows}


def _select_all(connection: sqlite3.Connection) -> dict[str, Launches]:
    found: dict[str, Launches] = {}
    rows = connection.execute(
        """SELECT key, extent, algorithm, seconds, workspace FROM problems JOIN launches ON problem = id
        ORDER BY id, algorithm, extent"""
    )
    for key, *row in rows:
        option = _option(*row)
        found.setdefault(key, {})[option.algorithm, option.extent] = option
    return found


def _insert(connection: sqlite3.Connection, key: str, options: list[Option]) -> None:
    with _transaction(connection):
        connection.execute("INSERT OR IGNORE INTO problems (key) VALUES (?)", (key,))
        (problem,) = connection.execute("SELECT id FROM problems WHERE key = ?", (key,)).fetchone()
        connection.executemany(
            "INSERT OR REPLACE INTO launches VALUES (?, ?, ?, ?, ?)",
            [(problem, row.algorithm, int(row.extent), float(row.seconds), int(row.workspace)) for row in options],
        )
