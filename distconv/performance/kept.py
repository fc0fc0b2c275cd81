"""A file of texts by key: findings that serve all programs of this user."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mucudnn.settings import cache_folder


def kept_here() -> Path:
    """The file of this user."""
    return cache_folder() / "performance.sqlite"


class Kept:
    """Texts by their keys, in an SQLite file that several processes may use at once.

    ``path``: of the file; None for memory alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(":memory:" if path is None else path, timeout=30)
        self._file.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        """The text of a key, None where there is none."""
        row = self._file.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        """Keeps a text, instead of the one that the key had."""
        with self._file:
            self._file.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))
