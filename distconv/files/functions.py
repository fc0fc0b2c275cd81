"""Replacements for Python's file functions, those of `os` and `open`, while a script runs on many ranks."""

from __future__ import annotations

import builtins
import functools
import operator
import os
import posix
import sys
from collections.abc import Callable
from typing import Any

from distconv.files.entry import Entry, Scan
from distconv.files.first_rank import FirstRank
from distconv.files.layer import FileLayer, is_same
from distconv.files.own_layer import WRITING, OwnLayer

Files = FirstRank | OwnLayer

ON_PURPOSE = ("torch.distributed.checkpoint",)  # Modules whose files every rank writes for real, and all ranks see.

CACHES = ("torch._inductor", "torch.utils.cpp_extension", "triton")
"""Modules that keep caches which other programs read: they write for real, too."""

_open: Any = builtins.open
_READING = frozenset("rbtU")


class Functions:
    """The replacements, which act on this rank's files. What every rank writes on purpose is marked in `shared`."""

    def __init__(self, files: Files, shared: FileLayer) -> None:
        self._files, self._shared = files, shared
        self._view = files.view if isinstance(files, OwnLayer) else None

    def table(self) -> dict[str, Callable[..., Any]]:
        """The functions of `os` by their names."""
        table: dict[str, Callable[..., Any]] = {}
        if self._view is not None:  # the first rank reads what is there
            for name in ("stat", "access", "readlink", "statvfs", "chdir", "getxattr", "listxattr"):
                table[name] = self._reading(name)
            table.update(lstat=self.lstat, getcwd=self.getcwd, getcwdb=self.getcwdb)
        for name in ("chmod", "chown", "utime", "setxattr", "removexattr"):
            table[name] = self._changing(name)
        for name in ("mkdir", "rmdir", "unlink"):
            table[name] = self._acting(name)
        for name in ("open", "rename", "link", "symlink", "truncate", "mkfifo", "listdir", "scandir"):
            table[name] = getattr(self, name)
        table["remove"], table["replace"] = table["unlink"], table["rename"]
        table["lchown"] = functools.partial(table["chown"], follow_symlinks=False)
        return table

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        """The same as `open`."""
        if opener is None and not isinstance(file, int):
            if not _READING.issuperset(mode):
                opener = self._opener
            elif self._view is not None:

                def really(path: Any) -> Any:
                    return _open(path, mode, buffering, encoding, errors, newline, closefd)

                opened = self._view.plainly(os.fsdecode(file), really, operator.methodcaller("close"))
                if opened is not None:
                    return opened[0]
                opener = self._opener
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def _opener(self, path: str, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        writing = flags & WRITING
        new = flags & os.O_EXCL and flags & os.O_CREAT
        name = self._name(path, dir_fd, follow=not (new or flags & os.O_NOFOLLOW))
        if writing and self._for_real(name):
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        return _reported(path, lambda: self._files.open(name, flags, mode))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        name = self._name(path, dir_fd, follow=False)
        return _reported(path, lambda: self._files.read(name, posix.lstat))

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self._name(src, src_dir_fd, follow=False), self._name(dst, dst_dir_fd, follow=False)
        if self._for_real(source) and self._for_real(target):
            return posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        _reported(src, lambda: self._files.rename(source, target), dst)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        source, target = self._name(src, src_dir_fd, follow=False), self._name(dst, dst_dir_fd, follow=False)
        _reported(src, lambda: self._files.link(source, target), dst)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        text, path = os.fsdecode(src), self._name(dst, dir_fd, follow=False)
        if self._files.is_apart(path):
            return posix.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        _reported(src, lambda: self._files.symlink(text, path), dst)

    def truncate(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            return posix.truncate(path, length)
        name = self._name(path)
        _reported(path, lambda: self._files.truncate(name, length))

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        name = self._name(path, dir_fd, follow=False)
        _reported(path, lambda: posix.mkfifo(self._files.for_writing(name, exclusive=True), mode))

    def listdir(self, path: Any = None) -> Any:
        name = self._folder_name(path)
        names = _reported(path, lambda: self._files.list(name))
        return [os.fsencode(found) for found in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = None) -> Any:
        name = self._folder_name(path)
        written = "." if path is None else path
        if is_same(name, written):
            found = self._files.scan(name, written)
            if found is not None and is_same(name, written):  # no link on the way was replaced meanwhile
                return found
        if isinstance(path, bytes):
            return Scan([_in_bytes(entry) for entry in self._entries(name, os.fsdecode(path))])
        shown = "" if isinstance(path, int) else "." if path is None else os.fspath(path)
        return Scan(_reported(path, lambda: self._entries(name, shown)))

    def getcwd(self) -> str:
        return self._files.names.working_folder()

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def _entries(self, folder: str, shown: str) -> list[Entry]:
        return [self._entry(name, f"{folder.rstrip('/')}/{name}", shown) for name in self._files.list(folder)]

    def _entry(self, name: str, path: str, shown: str) -> Entry:
        at, files = os.path.join(shown, name), self._files
        return Entry(
            name,
            at,
            lambda: _reported(at, lambda: files.read(path, posix.lstat)),
            lambda: _reported(at, lambda: files.read(files.names.name(path), posix.stat)),
        )

    def _reading(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(posix, name)
        takes_follow, view = name in ("stat", "access", "getxattr", "listxattr"), self._view
        assert view is not None

        def slowly(path: Any, args: tuple[Any, ...], dir_fd: int | None, follow: bool, named: dict[str, Any]) -> Any:
            if takes_follow and not follow:
                named["follow_symlinks"] = False
            absolute = self._name(path, dir_fd, follow=follow)
            found = _reported(path, lambda: self._files.read(absolute, lambda at: real(at, *args, **named)))
            return os.fsencode(found) if isinstance(path, bytes) and isinstance(found, str) else found

        def call(path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **named: Any) -> Any:
            if isinstance(path, int):
                return real(path, *args, **named)
            if not isinstance(path, bytes):
                path = os.fspath(path)
                if dir_fd is None and follow_symlinks:
                    result = view.plainly(path, lambda at: real(at, *args, **named))
                    if result is not None:
                        return result[0]
            return slowly(path, args, dir_fd, follow_symlinks and name != "readlink", named)

        def access(*args: Any, **named: Any) -> bool:
            try:
                return bool(call(*args, **named))
            except OSError:
                return False

        def chdir(path: Any) -> None:
            call(path)
            view.moved()

        special: dict[str, Callable[..., Any]] = {"access": access, "chdir": chdir}
        return special.get(name, call)

    def _acting(self, name: str) -> Callable[..., Any]:
        """A function that makes or removes one entry of a folder."""
        real, ours = getattr(posix, name), getattr(self._files, name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, **named: Any) -> None:
            absolute = self._name(path, dir_fd, follow=False)
            if self._for_real(absolute, marked=name == "unlink"):
                real(path, *args, dir_fd=dir_fd, **named)
            else:
                _reported(path, lambda: ours(absolute, *args, **named))

        return call

    def _changing(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(posix, name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **named: Any) -> Any:
            if isinstance(path, int):
                return real(path, *args, **named)
            if not follow_symlinks:
                named["follow_symlinks"] = False
            absolute = self._name(path, dir_fd, follow=follow_symlinks)
            if self._for_real(absolute, marked=False):
                return real(path, *args, **named)
            return _reported(path, lambda: self._files.change(absolute, lambda at: real(at, *args, **named)))

        return call

    def _name(self, path: Any, descriptor: int | None = None, *, follow: bool = True) -> str:
        try:
            return self._files.names.name(os.fsdecode(path), descriptor, follow=follow)
        except OSError as error:
            error.filename = path
            raise

    def _folder_name(self, path: Any) -> str:
        if isinstance(path, int):
            return self._name(".", path)
        return self._name("." if path is None else path)

    def _for_real(self, path: str, *, marked: bool = True) -> bool:
        """Whether the calling code writes real files on every rank. The path is then marked as shared.

        Paths that are left to the file system are written for real as well, and need no mark.
        """
        if self._files.is_apart(path):
            return True
        frame = sys._getframe(2)
        while frame is not None:
            module: str = frame.f_globals.get("__name__", "")
            if module.startswith(ON_PURPOSE):
                if marked:
                    self._shared.hide(path)
                return True
            if module.startswith(CACHES):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def _reported(path: Any, action: Callable[[], Any], second: Any = None) -> Any:
    """The action; an error of the file system names the path as the program wrote it."""
    try:
        return action()
    except OSError as error:
        error.filename = path
        if second is not None:
            error.filename2 = second
        raise


def _in_bytes(entry: Entry) -> Any:
    entry.name, entry.path = os.fsencode(entry.name), os.fsencode(entry.path)  # type: ignore[assignment]
    return entry
