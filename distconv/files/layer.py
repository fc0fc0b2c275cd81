"""A layer over the file system: it replaces the contents of some paths, and hides others.

The layer lives in a folder, so that all processes of a rank see it. It calls the file system through `posix`, because
the functions of `os` are replaced while a script runs.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import posix
import shutil
import stat
import threading
import time
from typing import Any

from mucudnn.process import renewed

_NUMBER_BYTES = 8


class FileLayer:
    """Two trees that mirror absolute paths: `there` has what is there, `gone` an empty file for what is not.

    A path beneath one that is gone is gone with it. A folder in either tree says only that something is
    beneath it; one in `there` is also a folder of the layer. `changes` is another number after every change
    that any process makes in the layer.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.there, self.gone = folder + "/there", folder + "/gone"
        self._replacing = folder + "/replacing"  # is there while a folder of markers gives way to a marker
        self._one_at_a_time = renewed(threading.Lock())
        for path in (folder, self.there, self.gone):
            with contextlib.suppress(FileExistsError):  # ranks make those that they share at the same time
                posix.mkdir(path, 0o700)
        descriptor = posix.open(folder + "/latest", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            posix.ftruncate(descriptor, _NUMBER_BYTES)
            self._latest = memoryview(mmap.mmap(descriptor, _NUMBER_BYTES)).cast("Q")
        finally:
            posix.close(descriptor)

    @property
    def changes(self) -> int:
        return self._latest[0]

    def changed(self) -> None:
        """To be called when the trees have changed, before anything else does."""
        # A file to which each change appends a byte gives it a number of its own, without a lock that whoever is
        # interrupted here would keep; to count in mapped memory would give two changes the same.
        log = posix.open(f"{self._folder}/changes", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            posix.write(log, b".")
            self._latest[0] = posix.lseek(log, 0, os.SEEK_CUR)
        finally:
            posix.close(log)

    def copy_in(self, source: str, path: str, *, content: bool = True) -> None:
        """Puts a copy of a real file or link into the layer; without `content` an empty one."""
        target = self.at(path)
        make_folders(os.path.dirname(target))
        copy(source, target, self._new_name(), content=content)
        self.changed()

    def _new_name(self) -> str:
        """A path in the layer's folder that nothing else takes; ranks in several containers may share a number."""
        return f"{self._folder}/part-{posix.urandom(8).hex()}"

    def at(self, path: str) -> str:
        """Where the layer keeps what it has at an absolute path."""
        return self.there + path

    def has(self, path: str) -> bool:
        """Whether the layer itself has something at the path."""
        return exists_at(self.there + path)

    def hides(self, path: str) -> bool:
        """Whether nothing beneath the layer is to be seen at the path; waits while `hide` replaces markers."""
        while not self._has_marker(path):
            if not exists_at(self._replacing):
                return False
            time.sleep(0)
        return True

    def hide(self, path: str) -> None:
        """From now on nothing beneath the layer is to be seen at the path, nor beneath it."""
        if self.hides(path):
            return
        marker = self.gone + path
        make_folders(os.path.dirname(marker))
        if not exists_at(marker):
            posix.close(posix.open(marker, os.O_WRONLY | os.O_CREAT, 0o600))
        else:
            self._replace(marker)
        self.changed()

    def _replace(self, folder: str) -> None:
        """Puts a marker in the place of a folder of markers."""
        aside = self._new_name()
        with self._one_at_a_time:
            posix.close(posix.open(self._replacing, os.O_WRONLY | os.O_CREAT, 0o600))
            try:
                posix.rename(folder, aside)
                posix.close(posix.open(folder, os.O_WRONLY | os.O_CREAT, 0o600))
            finally:
                posix.unlink(self._replacing)
        _remove_tree(aside)

    def _has_marker(self, path: str) -> bool:
        try:
            return not stat.S_ISDIR(posix.lstat(self.gone + path).st_mode)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return True

    def hidden_names(self, folder: str) -> set[str]:
        """The names in a folder that are gone by themselves."""
        return {entry.name for entry in entries(self.gone + folder) if not entry.is_dir(follow_symlinks=False)}

    def names(self, folder: str) -> set[str]:
        """The names in a folder that the layer itself has."""
        return {entry.name for entry in entries(self.there + folder)}

    def touches(self, folder: str) -> bool:
        """Whether the layer has anything of a folder or its contents."""
        return _reaches(self.there + folder) or _reaches(self.gone + folder)


def status_at(path: str) -> os.stat_result | None:
    """The result of lstat of a real path; None where it has none."""
    try:
        return posix.lstat(path)
    except OSError:
        return None


def is_folder(path: str) -> bool:
    """Whether a path of the file system is a folder, and no link to one."""
    status = status_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists_at(path: str) -> bool:
    """Whether there is anything at a real path, be it a link to nowhere."""
    try:
        posix.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_same(one: Any, other: Any) -> bool:
    """Whether two real paths lead to the same file or folder."""
    try:
        return os.path.samestat(posix.stat(one), posix.stat(other))
    except OSError:
        return False


def link_at(path: str) -> str | None:
    """The text of a real symbolic link; None for anything else."""
    try:
        return posix.readlink(path)
    except OSError:
        return None


def entries(folder: str) -> list[os.DirEntry[str]]:
    """The names in a real folder; none where there is no such folder."""
    try:
        with posix.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_folders(path: str) -> None:
    """Makes a real folder and those around it, where they are not there."""
    if exists_at(path):
        return
    make_folders(os.path.dirname(path))
    try:
        posix.mkdir(path, 0o700)
    except FileExistsError:
        return


def copy(source: str, target: str, partial: str, *, content: bool = True) -> None:
    """Copies a real file with its times and mode, or a symbolic link; the target appears complete, or not at all.

    `partial` is where the copy grows, on the target's disk. Without `content` the copy of a file is empty.
    """
    status = posix.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        posix.symlink(posix.readlink(source), target)
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "only files and links can be copied to a rank's own layer", source)
    try:
        with io.FileIO(partial, "w") as to:
            if content:
                with io.FileIO(source) as of:
                    shutil.copyfileobj(of, to, 1 << 20)
        with contextlib.suppress(PermissionError):
            posix.chown(partial, status.st_uid, status.st_gid)
        posix.chmod(partial, stat.S_IMODE(status.st_mode))
        posix.utime(partial, ns=(status.st_atime_ns, status.st_mtime_ns))
        posix.rename(partial, target)
    except BaseException:
        if exists_at(partial):
            posix.unlink(partial)
        raise


def _reaches(path: str) -> bool:
    try:
        posix.lstat(path)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return True


def _remove_tree(folder: str) -> None:
    for entry in entries(folder):
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(entry.path)
        else:
            posix.unlink(entry.path)
    posix.rmdir(folder)
