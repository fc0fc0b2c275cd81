"""The folder of a job's private files: one of its processes makes it, and it is removed when that process has ended.

That process keeps the folder locked while it lives. Others see the lock from any container that shares the temporary
files, where the process may have another number, or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posix
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "DISTCONV_FILES"
"""The variable by which `distconv run` gives its ranks the job's folder, which it removes when they have ended."""

KEY_BYTES = 32
_KEY = "key"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RELEASED_SECONDS = 1.0  # within which the system releases the locks of a process that has been killed

_locks: dict[str, int] = {}  # The folders that this process has made, and the open file by which each is locked.


def make_folder(job: str = "") -> str:
    """A new folder for a job, among the temporary files; folders that jobs of this machine have left are removed.

    It has a file that only its owner can read: a new random key, and `job`, which distinguishes this job from others.
    """
    begin = _beginning()
    for left in Path(tempfile.gettempdir()).glob(f"{begin}*"):
        _remove_unlocked(left)
    while True:
        folder = tempfile.mkdtemp(prefix=f"{begin}{os.getpid()}-")
        lock = os.open(folder, _FOLDER)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.path.isdir(folder):
            break
        os.close(lock)  # another job has removed it before it was locked
    _locks[folder] = lock
    with open(os.open(f"{folder}/{_KEY}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(posix.urandom(KEY_BYTES) + job.encode())
    return folder


def key_of(folder: str, job: str = "") -> bytes:
    """The key in a job's folder.

    RuntimeError, one line, where the path is not the folder that the same user made for the same `job`: what sent
    ranks to it may have been written by somebody else, and they write in it and remove it.
    """
    try:
        if not os.path.isabs(folder) or not os.path.basename(folder).startswith("distconv-"):
            raise OSError("no folder of a job has that name")
        around = os.open(folder, _FOLDER)
        try:
            file = os.open(_KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=around)
            try:
                found = os.read(file, KEY_BYTES + len(job.encode()) + 1)
                kept = [os.fstat(each) for each in (around, file)]
                private = all(each.st_uid == os.geteuid() and not each.st_mode & 0o077 for each in kept)
            finally:
                os.close(file)
        finally:
            os.close(around)
        if not private:
            raise OSError("others can write to it, or it is another user's")
        if found[KEY_BYTES:] != job.encode():
            raise OSError("it is another job's")
    except OSError as error:
        why = error.strerror or str(error)
        raise RuntimeError(f"the folder {folder!r} is not that of this job's private files: {why}") from None
    return found[:KEY_BYTES]


def remove_folders_of(process: int) -> None:
    """Removes what a process on this machine has made with `make_folder`; it has ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{_beginning()}{process}-*"):
        _remove_unlocked(left, _RELEASED_SECONDS)


def remove_folder(folder: str) -> None:
    """Removes a job's folder, whoever made it."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        posix.close(lock)


@contextlib.contextmanager
def job_folder() -> Iterator[str]:
    """A job's folder, removed at the end, whatever has become of the ranks."""
    folder = make_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


def _beginning() -> str:
    return f"distconv-{socket.gethostname()}-"


def _remove_unlocked(folder: Path, seconds: float = 0.0) -> None:
    """Removes a folder of this user that no process has locked, or that is released within so many seconds."""
    deadline = time.monotonic() + seconds
    try:
        found = os.open(folder, _FOLDER)
    except OSError:  # a link, or already removed
        return
    try:
        if os.fstat(found).st_uid != os.geteuid():
            return
        while True:
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(found)


def _release_in_child() -> None:
    for lock in _locks.values():
        posix.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_release_in_child)
