"""The SQLite database of measured times, which threads, processes and runs share.

A row is one launch: an algorithm at an extent, with its seconds and its workspace. A row depends on no limit and on no
batch size, so the same rows serve every limit and every batch size.
"""

from __future__ import annotations

import atexit
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mucudnn.optimizer import Option
from mucudnn.process import Recent, in_child, renewed, warn
from mucudnn.settings import MEMORY
from mucudnn.timing import database
from mucudnn.timing.database import LAUNCHES, Damaged, Kept, Launches, Result, guarded

MOST_KEYS = 8192  # The number of (table, key) pairs that are kept in memory, too; launches only where there is no file.

_SIDECARS = ("-journal", "-wal", "-shm")


class Counts(NamedTuple):
    """The numbers of rows of a store."""

    problems: int
    launches: int


class Store:
    """Measured launches by key.

    A key is a dict of plain values that says everything that changes a launch's time, except its algorithm and extent.

    A file that is damaged or belongs to something else is set aside under a new name. Where the file cannot be
    written, its rows are still read, and new ones are in this process only. Each causes one warning. Rows are in the
    file before `record` returns, and within a second after `record_later`.
    """

    def __init__(self, path: str, patience: float = 30.0) -> None:
        self.path = path if path == MEMORY else os.path.abspath(path)  # Of the file, absolute, or `:memory:`.
        self.patience = patience  # Seconds to wait for other processes that are writing.
        self._lock = renewed(threading.Lock())
        self._connection: sqlite3.Connection | None = None
        self._readable = path != MEMORY
        self._writable = path != MEMORY
        self._memory: Recent[tuple[str, str], Kept] = Recent(MOST_KEYS)
        self._deferred = DeferredWrites(self._record)
        in_child(self._leave_to_parent)

    @property
    def persistent(self) -> bool:
        """Whether new rows go to the file; False for `:memory:` and after a failure to write."""
        return self._writable

    def launches(self, key: Mapping[str, Any]) -> Launches:
        """Everything measured for the key, by (algorithm, extent)."""
        text, later = canonical(key), self._deferred.rows()
        with self._lock:
            known = self._read(LAUNCHES, text).get(text, {}) | self._memory.get((LAUNCHES, text), {})
        return known | later.get(text, {})

    def record(self, key: Mapping[str, Any], options: Iterable[Option]) -> None:
        """Adds launches of the key, replacing those of the same algorithm and extent."""
        self._record(canonical(key), _by_name(options))

    def record_later(self, key: Mapping[str, Any], options: Iterable[Option]) -> None:
        """Records without waiting for the file, which has the rows within a second, or when the process ends."""
        self._deferred.add(canonical(key), _by_name(options))

    def _record(self, text: str, found: Launches) -> None:
        rows = [(o.algorithm, int(o.extent), float(o.seconds), int(o.workspace)) for o in found.values()]
        with self._lock:
            if not self._write(LAUNCHES, text, rows):
                self._memory[LAUNCHES, text] = self._memory.get((LAUNCHES, text), {}) | found

    def kept(self, table: str, key: Mapping[str, Any]) -> Kept:
        """The values of a table for the key, by name; not to be changed.

        The tables are "needs", workspaces of launches that were asked for, `None` of those that are not served; of
        cuDNN each answer takes a plan, that is milliseconds; "settlements", plans by their terms; and "compiled",
        cuDNN's texts of plans that were compiled for launches.
        """
        with self._lock:
            return self._kept(table, canonical(key))

    def keep(self, table: str, key: Mapping[str, Any], name: str, value: str | int | None) -> None:
        """Adds a value to what a table keeps of the key, in place of one of that name."""
        text = canonical(key)
        with self._lock:
            self._kept(table, text)[name] = value
            self._write(table, text, [(name, value)])

    def _kept(self, table: str, text: str) -> Kept:
        if (table, text) not in self._memory:
            self._memory[table, text] = self._read(table, text).get(text, {})
        return self._memory[table, text]

    def everything(self, table: str) -> list[tuple[dict[str, Any], Kept]]:
        """Every key with what a table keeps of it, keys in the order in which they were first recorded."""
        later = self._deferred.rows() if table == LAUNCHES else {}
        with self._lock:
            found = self._read(table)
            for (of, text), values in self._memory.items():
                if of == table:
                    found[text] = found.get(text, {}) | values
        for text, values in later.items():
            found[text] = found.get(text, {}) | values
        return [(json.loads(text), values) for text, values in found.items()]

    def contents(self) -> list[tuple[dict[str, Any], list[Option]]]:
        """Every key with its launches, keys in the order in which they were first recorded."""
        return [(key, list(launches.values())) for key, launches in self.everything(LAUNCHES)]

    def counts(self) -> Counts:
        """How many keys and launches there are."""
        contents = self.contents()
        return Counts(len(contents), sum(len(launches) for _, launches in contents))

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        self._deferred.flush()
        with self._lock:
            self._disconnect()

    def __del__(self) -> None:
        self._disconnect()

    def _read(self, table: str, text: str | None = None) -> dict[str, Kept]:
        """The values of a table of the file for a key, or for all; none where there is no readable file."""
        if not self._readable:
            return {}
        try:
            return self._attempt(lambda connection: database.select_rows(connection, table, text))
        except (sqlite3.Error, OSError, Damaged) as error:
            self._readable = self._writable = False
            self._disconnect()
            self._warn(f"cannot be used ({error}); times are kept in memory")
            return {}

    def _write(self, table: str, text: str, rows: Sequence[tuple[str | int | float | None, ...]]) -> bool:
        """Adds rows to a table of the file; returns whether they are there."""
        try:
            if self._writable:
                self._attempt(lambda connection: database.insert(connection, table, text, rows))
        except (sqlite3.Error, OSError, Damaged) as error:
            self._writable = False
            self._warn(f"cannot be written ({error}); new times are kept in memory")
        return self._writable

    def _attempt(self, action: Callable[[sqlite3.Connection], Result]) -> Result:
        """The action on the open file, once more on a fresh one if the file turns out to be damaged."""
        try:
            return guarded(action, self._connected())
        except Damaged as damage:
            self._disconnect()
            try:
                self._set_aside()
            except (sqlite3.Error, OSError) as error:
                raise Damaged(f"{damage}; it cannot be renamed: {error}") from error
            return guarded(action, self._connected())

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            connection = database.connect(self.path, self.patience)
            try:
                guarded(database.prepare, connection)
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
        with database.locked(f"{self.path}.lock", self.patience):
            try:
                self._connected()
                guarded(database.check_pages, self._connected())
                return
            except Damaged as damage:
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
        warn(f"the database {self.path} {what}")

    def _leave_to_parent(self) -> None:
        # SQLite forbids even closing a connection that was opened before a fork.
        _orphans.append(self._connection)
        self._connection = None


_orphans: list[sqlite3.Connection | None] = []


def _by_name(options: Iterable[Option]) -> Launches:
    return {(option.algorithm, option.extent): option for option in options}


def canonical(key: Mapping[str, Any]) -> str:
    """One text for equal keys."""
    return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)


PERIOD = 1.0
"""Seconds from a launch that is added to the next writing: a program that is killed loses what was noted in between."""


class DeferredWrites:
    """Launches by the text of their key, until they are written."""

    def __init__(self, write: Callable[[str, Launches], None]) -> None:
        """``write``: writes the launches of one key, waiting as long as that takes."""
        self._write = write
        self._lock, self._writing = renewed(threading.Lock()), renewed(threading.Lock())
        self._leave_to_parent()
        in_child(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        self._rows: dict[str, Launches] = {}
        self._timer: threading.Timer | None = None

    def add(self, text: str, launches: Launches) -> None:
        """Adds launches of a key; returns at once."""
        with self._lock:
            self._rows[text] = self._rows.get(text, {}) | launches
            if self._timer is None:
                self._timer = threading.Timer(PERIOD, self.flush)
                self._timer.daemon = True
                self._timer.start()
                atexit.register(self.flush)

    def rows(self) -> Mapping[str, Launches]:
        """The launches that are not written yet."""
        with self._lock:
            return dict(self._rows)

    def flush(self) -> None:
        """Writes everything now."""
        with self._writing:
            with self._lock:
                timer, self._timer = self._timer, None
                rows = dict(self._rows)
            if timer is not None:
                timer.cancel()
                atexit.unregister(self.flush)
            for text, launches in rows.items():
                self._write(text, launches)
                with self._lock:  # not before it is on the file, where readers look next; what was noted since stays
                    left = self._rows.get(text, {})
                    left = {name: option for name, option in left.items() if launches.get(name) != option}
                    if left:
                        self._rows[text] = left
                    else:
                        self._rows.pop(text, None)
