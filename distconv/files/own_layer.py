"""The file functions of all ranks but the first: they change the rank's own layer, never the file system."""

from __future__ import annotations

import errno
import os
import posix
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from distconv.files.entry import Scan
from distconv.files.layer import make_folders
from distconv.files.view import FileView

T = TypeVar("T")

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def error(number: int, path: str) -> OSError:
    """The error of the file system by its number."""
    return OSError(number, os.strerror(number), path)


class OwnLayer:
    """Each function takes absolute paths without links on the way, and acts and fails as the one of `os` does."""

    def __init__(self, view: FileView) -> None:
        self.view, self._own, self.names, self.is_apart = view, view.own, view.names, view.is_apart

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        def opened(found: str) -> int:
            return posix.open(found, flags, mode)

        if not flags & WRITING:
            return self.view.steadily(path, opened, posix.close)
        status = self.view.status(path)
        if status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            return self.view.steadily(path, opened, posix.close)  # a device, a pipe
        return opened(
            self.for_writing(
                path, create=bool(flags & os.O_CREAT), exclusive=bool(flags & os.O_EXCL), content=not flags & os.O_TRUNC
            )
        )

    def for_writing(self, path: str, *, create: bool = True, exclusive: bool = False, content: bool = True) -> str:
        """Where this rank may write the file of a path; its contents are there, where `content` is to be kept."""
        if self.is_apart(path):
            return path
        status = self.view.status(path)
        if status is None:
            if not create:
                raise self.view.missing(path)
            self._make_around(path)
            return self._own.at(path)
        if create and exclusive:
            raise error(errno.EEXIST, path)
        if stat.S_ISDIR(status.st_mode):
            raise error(errno.EISDIR, path)
        return self._own_copy(path, content=content)

    def change(self, path: str, action: Callable[[str], T]) -> T:
        """An action that changes what is kept about a file or folder: its mode, its times, its length."""
        if stat.S_ISDIR(self._status(path).st_mode):
            make_folders(self._own.at(path))
            self._own.changed()
            return action(self._own.at(path))
        return action(self._own_copy(path))

    def truncate(self, path: str, length: int) -> None:
        posix.truncate(self.for_writing(path, create=False), length)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._make_room(path)
        posix.mkdir(self._own.at(path), mode)
        self._own.changed()

    def rmdir(self, path: str) -> None:
        if self.list(path):
            raise error(errno.ENOTEMPTY, path)
        if self._own.has(path):
            posix.rmdir(self._own.at(path))
        self._leave(path)

    def unlink(self, path: str) -> None:
        if stat.S_ISDIR(self._status(path).st_mode):
            raise error(errno.EISDIR, path)
        if self._own.has(path):
            posix.unlink(self._own.at(path))
        self._leave(path)

    def rename(self, source: str, target: str) -> None:
        moved, replaced = self._status(source), self.view.status(target)
        if source == target:
            return
        self._check_replacement(source, target, moved, replaced)
        self._make_around(target)
        for path in (source, target):
            if self.is_apart(path):
                raise error(errno.EXDEV, path)  # as between two disks: shutil.move then copies
        self._own_copies(source, moved)
        if stat.S_ISDIR(moved.st_mode):
            if self._own.has(target):
                posix.rmdir(self._own.at(target))
            if self.view.has_beneath(target):
                self._own.hide(target)  # what was in it once must not be seen in the new folder
        posix.rename(self._own.at(source), self._own.at(target))
        self._leave(source)

    def link(self, source: str, target: str) -> None:
        status = self._status(source)
        self._make_room(target)
        if stat.S_ISDIR(status.st_mode):
            raise error(errno.EPERM, source)
        posix.link(self._own_copy(source), self._own.at(target), follow_symlinks=False)
        self._own.changed()

    def symlink(self, text: str, path: str) -> None:
        self._make_room(path)
        posix.symlink(text, self._own.at(path))
        self._leave_links()

    def read(self, path: str, action: Callable[[str], T]) -> T:
        """An action that changes nothing."""
        return self.view.steadily(path, action)

    def scan(self, folder: str, written: Any) -> Iterator[os.DirEntry[Any]] | None:
        """What posix.scandir gives of a folder, by its path as it was written; None where the disk does not say."""
        if self.is_apart(folder):
            return posix.scandir(written)
        try:
            # All at once: the first rank may change the folder before the last entry is taken.
            return self.view.untouched(folder, lambda: Scan(list(posix.scandir(written))))
        except OSError:
            return None

    def list(self, folder: str) -> list[str]:
        """The names in a folder, in the order of `View.list`."""
        if not stat.S_ISDIR(self._status(folder).st_mode):
            raise error(errno.ENOTDIR, folder)
        return self.view.list(folder)

    def _status(self, path: str) -> os.stat_result:
        """The result of lstat of a path. FileNotFoundError or NotADirectoryError where there is nothing."""
        status = self.view.status(path)
        if status is None:
            raise self.view.missing(path)
        return status

    def _make_room(self, path: str) -> None:
        """Mirrors the folder around a path, where there must be nothing yet."""
        if self.view.status(path) is not None:
            raise error(errno.EEXIST, path)
        self._make_around(path)

    def _make_around(self, path: str) -> None:
        """Mirrors the folder around a path that is to be made."""
        folder = os.path.dirname(path)
        status = self.view.status(folder)
        if status is None:
            raise self.view.missing(path)
        if not stat.S_ISDIR(status.st_mode):
            raise error(errno.ENOTDIR, path)
        number = self.view.steadily(folder, lambda found: _refusal(found) if found == folder else 0)
        if number:
            raise error(number, path)
        make_folders(self._own.at(folder))
        self._own.changed()

    def _own_copy(self, path: str, *, content: bool = True) -> str:
        """The path in the rank's own layer of a file or link that is there, with its contents."""
        own = self._own.at(path)
        if not self._own.has(path):
            self._copy_up(path, content=content, check=True)
        return own

    def _copy_up(self, path: str, *, content: bool = True, check: bool = False) -> None:
        """Copies what is beneath the layer into it; with `check` only what may be written."""
        while True:
            found = self.view.beneath(path)
            if found is None:
                raise self.view.missing(path)
            try:
                link = self.view.names.link_at(path) is not None
                if check and not link and not posix.access(found, os.W_OK):
                    raise error(errno.EACCES, path)
                self._own.copy_in(found, path, content=content)
            except OSError:
                if self.view.beneath(path) == found:
                    raise
                continue  # the first rank was changing it
            if self.view.beneath(path) == found:
                return
            posix.unlink(self._own.at(path))

    def _own_copies(self, path: str, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            if not self._own.has(path):
                self._copy_up(path)
            return
        names = self.view.list(path)
        make_folders(self._own.at(path))
        for name in names:
            within = self.view.status(f"{path}/{name}")
            if within is not None:
                self._own_copies(f"{path}/{name}", within)

    def _check_replacement(
        self, source: str, target: str, moved: os.stat_result, replaced: os.stat_result | None
    ) -> None:
        folder = stat.S_ISDIR(moved.st_mode)
        if folder and target.startswith(source + "/"):
            raise error(errno.EINVAL, source)
        if source.startswith(target + "/"):
            raise error(errno.ENOTEMPTY, source)
        if replaced is None:
            return
        if folder and not stat.S_ISDIR(replaced.st_mode):
            raise error(errno.ENOTDIR, source)
        if not folder and stat.S_ISDIR(replaced.st_mode):
            raise error(errno.EISDIR, source)
        if folder and self.view.list(target):
            raise error(errno.ENOTEMPTY, source)

    def _leave(self, path: str) -> None:
        """Called when the file or folder at a path is gone."""
        if self.view.has_beneath(path):
            self._own.hide(path)
        self._leave_links()

    def _leave_links(self) -> None:
        self._own.changed()
        self.view.names.forget()


def _refusal(folder: str) -> int:
    """The number of the error of making something in a folder on the disk; 0 where it may be made."""
    if posix.access(folder, os.W_OK | os.X_OK):
        return 0
    return errno.EROFS if posix.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
