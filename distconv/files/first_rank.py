"""The file functions of the first rank: they change real files, and keep the earlier contents for the other ranks."""

from __future__ import annotations

import os
import posix
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from distconv.files.layer import FileLayer, copy, exists_at, is_folder, link_at, make_folders, status_at
from distconv.files.names import Names
from distconv.files.own_layer import WRITING

T = TypeVar("T")


class FirstRank:
    """Each function takes absolute paths without links on the way, and acts and fails as the one of `os` does.

    Before it changes a path for the first time it puts into the layer `before` what the path was: nothing, a folder, or
    a file, by a hard link where that is possible. A file that was there is never changed in place, where another rank
    may be reading it: a fresh one takes its name first, unless it has several names or its folder cannot be written.
    """

    def __init__(self, before: FileLayer, apart: tuple[str, ...] = ()) -> None:
        self._before, self._apart = before, apart
        self._noted: set[str] = set()
        self._read_by_others: dict[tuple[int, int], str] = {}  # the paths in `before` of files, by device and inode
        self.names = Names(link_at)

    def is_apart(self, path: str) -> bool:
        return path.startswith(self._apart)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & WRITING:
            self.before_writing(path, content=not flags & os.O_TRUNC)
        return posix.open(path, flags, mode)

    def for_writing(self, path: str, *, create: bool = True, exclusive: bool = False, content: bool = True) -> str:
        if not self.is_apart(path):
            self.before_writing(path, content=content)
        return path

    def before_writing(self, path: str, *, content: bool = True) -> None:
        """Notes what a path is whose file is to be made, or changed in place."""
        status = status_at(path)
        if status is None:
            self.note(path)
        elif stat.S_ISREG(status.st_mode) and posix.access(path, os.W_OK):
            self.note(path)
            if (status.st_dev, status.st_ino) in self._read_by_others:
                self._refresh(path, status, content)

    def note(self, path: str, *, tree: bool = False) -> None:
        """Keeps what a path was when the job began; with `tree` also what was in a folder."""
        if self.is_apart(path):
            return
        status = status_at(path)
        if tree and status is not None and stat.S_ISDIR(status.st_mode) and not self._before.hides(path):
            for name in posix.listdir(path):
                self.note(f"{path}/{name}", tree=True)
        if path in self._noted:
            return
        self._noted.add(path)
        if self._before.has(path) or self._before.hides(path):
            # A folder in `before` may be there for what is beneath it only; then it was a folder, too.
            return
        if status is None:
            if exists_at(os.path.dirname(path)):
                self._before.hide(path)
            else:
                self._noted.discard(path)  # it cannot be made yet
        elif stat.S_ISDIR(status.st_mode):
            make_folders(self._before.at(path))
            self._before.changed()
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            self._keep(path, status)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.note(path)
        posix.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        self._note_empty(path)
        posix.rmdir(path)
        self.names.forget()

    def unlink(self, path: str) -> None:
        self.note(path)
        posix.unlink(path)
        self.names.forget()

    def rename(self, source: str, target: str) -> None:
        self.note(source, tree=True)
        if is_folder(source):
            self._before.hide(source)
        self._note_empty(target)
        posix.rename(source, target)
        self.names.forget()

    def link(self, source: str, target: str) -> None:
        self.note(target)
        self._note_copied(source)
        posix.link(source, target, follow_symlinks=False)

    def symlink(self, text: str, path: str) -> None:
        self.note(path)
        posix.symlink(text, path)
        self.names.forget()

    def truncate(self, path: str, length: int) -> None:
        self.before_writing(path)
        posix.truncate(path, length)

    def change(self, path: str, action: Callable[[str], T]) -> T:
        return action(path)

    def read(self, path: str, action: Callable[[str], T]) -> T:
        return action(path)

    def scan(self, folder: str, written: Any) -> Iterator[os.DirEntry[Any]] | None:
        """What posix.scandir gives of a folder, by its path as it was written; None where that is to be sorted."""
        return None if self._before.touches(folder) else posix.scandir(written)

    def list(self, folder: str) -> list[str]:
        """In the file system's order; sorted where the script has changed something, as on the other ranks."""
        names = posix.listdir(folder)
        return sorted(names) if self._before.touches(folder) else names

    def _note_copied(self, path: str) -> None:
        """Notes a file that gets a second name, under which it may be changed in place: the kept one is a copy."""
        self.note(path)
        status = status_at(path)
        kept = None if status is None else self._read_by_others.pop((status.st_dev, status.st_ino), None)
        if kept is not None:
            self._before.copy_in(self._before.at(kept), kept)

    def _note_empty(self, path: str) -> None:
        """Notes a path that is about to be removed. What `before` has of an empty folder is then all that was in it."""
        self.note(path)
        if is_folder(path) and not posix.listdir(path):
            self._before.hide(path)

    def _keep(self, path: str, status: os.stat_result) -> None:
        kept = self._before.at(path)
        make_folders(os.path.dirname(kept))
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            try:
                posix.link(path, kept, follow_symlinks=False)
                self._before.changed()
            except OSError:  # another disk, or one without hard links
                self._before.copy_in(path, path)
            self._read_by_others[status.st_dev, status.st_ino] = path
        else:
            self._before.copy_in(path, path)

    def _refresh(self, path: str, status: os.stat_result, content: bool) -> None:
        """Gives a path a file of its own that may be changed in place; the one it shares stays as it is."""
        kept = self._read_by_others.pop((status.st_dev, status.st_ino))
        folder, name = os.path.split(path)
        fresh = f"{folder}/.{name}.distconv{posix.urandom(4).hex()}"
        try:
            self._before.hide(fresh)
            copy(path, path, fresh, content=content)
        except PermissionError:  # only the file may be written: the kept one becomes a copy
            self._before.copy_in(self._before.at(kept), kept)
