"""Entries of os.scandir for a folder that is not a single folder on the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

E = TypeVar("E")


class Entry:
    """As os.DirEntry: `status` asks without following links, `followed` follows them; OSError where they fail."""

    def __init__(
        self, name: str, path: str, status: Callable[[], os.stat_result], followed: Callable[[], os.stat_result]
    ) -> None:
        self.name, self.path = name, path
        self._status, self._followed = status, followed

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<Entry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._followed() if follow_symlinks else self._status()

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            status = self._status()
            if follow and stat.S_ISLNK(status.st_mode):
                status = self._followed()
        except OSError:
            return False
        return kind(status.st_mode)


class Scan(Iterator[E]):
    """The iterator that os.scandir gives."""

    def __init__(self, entries: list[E]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> E:
        return next(self._entries)

    def __enter__(self) -> Scan[E]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
