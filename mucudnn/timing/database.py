"""The SQLite file of measured times: its tables, and the statements that read and write them."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mucudnn.optimizer import Option

_HEADER = 100  # Bytes of the header of a file of SQLite.

_APPLICATION = 0x6D754344  # "muCD"
_VERSION = 2
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
_LATER = {
    "needs": "launch TEXT NOT NULL, workspace INTEGER CHECK (workspace >= 0), PRIMARY KEY (problem, launch)",
    "settlements": "terms TEXT NOT NULL, plan TEXT NOT NULL, PRIMARY KEY (problem, terms)",
    "compiled": "launch TEXT NOT NULL, plan TEXT NOT NULL, PRIMARY KEY (problem, launch)",
}
"""The tables of a problem beside its launches, by names. Each is made for its first row: files without it are valid,
and a file may be read-only."""

_DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}

LAUNCHES = "launches"  # The table that each file has.

Launches = dict[tuple[str, int], Option]
Kept = dict[Any, Any]
Result = TypeVar("Result")


class Damaged(Exception):
    """The file is no database of ours, or no longer."""


def connect(path: str, patience: float) -> sqlite3.Connection:
    """Opens a file that is ours, or empty, or not there yet; raises `Damaged` for another."""
    _examine(path)
    # The rollback journal stays, as a write-ahead log needs memory shared by all users, which a home directory on a
    # network does not give, and a writable directory even to read.
    return sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)


def _examine(path: str) -> None:
    """Reads what the file says of itself, where SQLite's file format has it.

    SQLite is not to open a file that is set aside next. Where another process has renamed it in the meantime and made a
    fresh one, SQLite would find the fresh one's journal by its name, and empty the renamed file by it.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER)
    except OSError:  # SQLite says why, if it cannot open it either
        return
    if not header:
        return
    if len(header) < _HEADER or not header.startswith(b"SQLite format 3\0"):
        raise Damaged("file is not a database")
    version, _, application = struct.unpack_from(">3I", header, 60)
    if application != _APPLICATION:
        raise Damaged("it is a database of another application")
    if version != _VERSION:
        raise Damaged(f"its format is {version}, here it is {_VERSION}")


def guarded(action: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
    """The action's result; errors that mean a damaged file raise `Damaged`."""
    try:
        return action(connection)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF in _DAMAGE:
            raise Damaged(str(error)) from error
        raise


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    with connection:  # commits, or rolls back where that fails
        connection.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def locked(path: str, patience: float) -> Iterator[None]:
    """Lets one process in at a time, until it leaves or dies.

    The empty lock file is never removed: another process might just have opened it.
    """
    with contextlib.closing(sqlite3.connect(path, timeout=patience, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


def prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables of an empty file."""
    # What is committed survives the process. Waiting for the disk as well, at every launch that is timed, would only
    # guard against a crash of the whole machine.
    connection.execute("PRAGMA synchronous = OFF")
    if _is_empty(connection):
        with transaction(connection):
            if _is_empty(connection):
                for statement in _SCHEMA:
                    connection.execute(statement)


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def check_pages(connection: sqlite3.Connection) -> None:
    """Reads every page, since the damage may be on any of them."""
    (answer, *_) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if answer != "ok":
        raise Damaged(answer)
    select_rows(connection, LAUNCHES)


def select_rows(connection: sqlite3.Connection, table: str, key: str | None = None) -> dict[str, Kept]:
    """The values of a table for a key, by name, or of every key if none is given, in the order of their first rows."""
    if (
        table in _LATER
        and connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is None
    ):
        return {}
    query = f"SELECT key, {table}.* FROM problems JOIN {table} ON problem = id"
    query += " ORDER BY id, 3, 4" if key is None else " WHERE key = ?"
    found: dict[str, Kept] = {}
    try:
        for text, _, *row in connection.execute(query, () if key is None else (key,)):
            name, value = row if table in _LATER else _launch(*row)
            found.setdefault(text, {})[name] = value
    except (ValueError, TypeError) as error:
        raise Damaged(str(error)) from error
    return found


def _launch(algorithm: str, extent: int, seconds: float, workspace: int) -> tuple[tuple[str, int], Option]:
    return (algorithm, extent), Option(extent, algorithm, seconds, workspace)


def insert(
    connection: sqlite3.Connection, table: str, key: str, rows: Sequence[tuple[str | int | float | None, ...]]
) -> None:
    """Adds rows to what a table keeps of a key, in place of those of the same names."""
    with transaction(connection):
        if table in _LATER:
            columns = f"problem INTEGER NOT NULL REFERENCES problems (id), {_LATER[table]}"
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) WITHOUT ROWID")
        connection.execute("INSERT OR IGNORE INTO problems (key) VALUES (?)", (key,))
        (problem,) = connection.execute("SELECT id FROM problems WHERE key = ?", (key,)).fetchone()
        values = ", ".join("?" * (3 if table in _LATER else 5))
        connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({values})", [(problem, *row) for row in rows])
