"""The files that a rank sees: those of its own layer, above the files as they were when the job began."""

from __future__ import annotations

import errno
import os
import posix
import stat
from collections.abc import Callable
from typing import TypeVar

from distconv.files.layer import FileLayer, entries, exists_at, is_folder, is_same, link_at
from distconv.files.names import Names

T = TypeVar("T")


class FileView:
    """The files of a rank other than the first.

    Args:
        own: what this rank's script has written and removed.
        before: what the first rank's script has changed for real, as it was before.
        shared: what several ranks write for real, on purpose; its markers (`hide`) say so, path by path.
        apart: beginnings of paths that are left to the file system (devices, this rank's temporary folder).
    """

    def __init__(self, own: FileLayer, before: FileLayer, shared: FileLayer, apart: tuple[str, ...] = ()) -> None:
        self.own, self._before, self.shared = own, before, shared
        self._layers, self._apart = (own, before, shared), apart
        self.names = Names(self._link_at, own.there)
        self._untouched: dict[str, tuple[int, int, int]] = {}
        self._plain: dict[str, tuple[int, int, int]] = {}

    def plainly(
        self, path: str, action: Callable[[str], T], undo: Callable[[T], None] | None = None
    ) -> tuple[T] | None:
        """The action's result where the file system alone can give it: for files in folders that no layer touches.

        None where it cannot. `path` is as the program wrote it. This is the short way for a program's data.
        """
        folder, slash, name = path.rpartition("/")
        changes = self._changes()
        if not slash or name in ("", ".", "..") or self._plain.get(folder) != changes:
            if slash and name not in ("", ".", ".."):
                around = self.names.name(folder or "/")
                if self.is_untouched(around) and is_same(folder or "/", around):
                    self._plain[folder] = changes
            return None
        if link_at(path) is not None:
            return None
        result = action(path)
        if self._changes() == changes:
            return (result,)
        if undo is not None:
            undo(result)
        return None

    def moved(self) -> None:
        """The working folder is another."""
        self._plain.clear()

    def is_apart(self, path: str) -> bool:
        return path.startswith(self._apart)

    def find(self, path: str) -> str | None:
        """Where on the disk the file of an absolute path is, if it is at all; None where it is hidden."""
        if self.is_apart(path) or self.is_untouched(os.path.dirname(path)) or self.shared.hides(path):
            return path
        if self.own.has(path):
            return self.own.at(path)
        return self.beneath(path)

    def beneath(self, path: str) -> str | None:
        """The same as `find`, without the rank's own layer."""
        if self.own.hides(path):
            return path if exists_at(self.shared.gone + path) else None
        # Asked first: the first rank keeps what a path was before it hides the path.
        is_hidden = self._before.hides(path)
        if self._before.has(path):
            kept = self._before.at(path)
            return path if is_folder(kept) and is_folder(path) else kept
        if is_hidden:
            return path if exists_at(self.shared.gone + path) else None
        return path

    def has_beneath(self, path: str) -> bool:
        """Whether there is anything at the path beneath the rank's own layer."""
        while True:
            found = self.beneath(path)
            is_found = found is not None and exists_at(found)
            if self.beneath(path) == found:
                return is_found

    def steadily(self, path: str, action: Callable[[str], T], undo: Callable[[T], None] | None = None) -> T:
        """The action on the file of an absolute path; again where the first rank has changed the file meanwhile.

        `undo` takes back a result that does not count. FileNotFoundError where there is no file. Other errors are the
        action's.
        """
        while True:
            found = self.find(path)
            if found is None:
                raise self.missing(path)
            try:
                result = action(found)
            except OSError as error:
                if self.find(path) != found:
                    continue
                if error.errno in (errno.ENOENT, errno.ENOTDIR) and self.status(path) is None:
                    raise self.missing(path) from None
                raise
            if self.find(path) == found:
                return result
            if undo is not None:
                undo(result)

    def status(self, path: str) -> os.stat_result | None:
        """The result of lstat of an absolute path; None where there is nothing."""
        while True:
            found = self.find(path)
            if found is None:
                return None
            try:
                status = posix.lstat(found)
            except (FileNotFoundError, NotADirectoryError):
                status = None
            if self.find(path) == found:
                return status

    def missing(self, path: str) -> OSError:
        """The error of asking for a path that is not there: a folder around it may be a file."""
        folder = os.path.dirname(path)
        while (status := self.status(folder)) is None:
            folder = os.path.dirname(folder)
        number = errno.ENOENT if stat.S_ISDIR(status.st_mode) else errno.ENOTDIR
        return OSError(number, os.strerror(number), path)

    def list(self, folder: str) -> list[str]:
        """The names in a folder: in the file system's order, or sorted where the script has changed something there.

        Sorted, because every rank must see one order, and the ranks' disks differ.
        """
        if self.is_apart(folder):
            return posix.listdir(folder)
        names = self.untouched(folder, lambda: posix.listdir(folder))
        if names is not None:
            return names
        while True:
            is_hidden = self._before.hides(folder)
            found = self._listed(folder, is_hidden)
            if self._before.hides(folder) == is_hidden:
                return sorted(found)

    def _listed(self, folder: str, is_hidden: bool) -> set[str]:
        found: set[str] = set()
        # Real names first: what the first rank has changed since is then known by `before`.
        if not self.own.hides(folder):
            if not is_hidden:
                found = {entry.name for entry in entries(folder)}
            found = (found - self._before.hidden_names(folder)) | self._before.names(folder)
        found = (found - self.own.hidden_names(folder)) | self.own.names(folder)
        shared = {entry.name for entry in entries(self.shared.gone + folder)}
        return found | {name for name in shared if exists_at(f"{folder}/{name}")}

    def _changes(self) -> tuple[int, int, int]:
        return self.own.changes, self._before.changes, self.shared.changes

    def _link_at(self, path: str) -> str | None:
        try:
            return self.steadily(path, posix.readlink)
        except OSError:
            return None

    def untouched(self, folder: str, action: Callable[[], T]) -> T | None:
        """The result of an action on a folder; `None` unless no layer has said anything of the folder by its end."""
        if not self.is_untouched(folder):
            return None
        try:
            found = action()
        except OSError:
            if self.is_untouched(folder):
                raise
            return None
        return found if self.is_untouched(folder) else None

    def is_untouched(self, folder: str) -> bool:
        """Whether no layer has anything of a folder or its contents."""
        changes = self._changes()
        if self._untouched.get(folder) == changes:
            return True
        if any(layer.touches(folder) for layer in self._layers):
            return False
        self._untouched[folder] = changes
        return True
