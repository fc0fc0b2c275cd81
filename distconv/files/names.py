"""Resolves a path as a program writes it to an absolute path without symbolic links."""

from __future__ import annotations

import errno
import os
import posix
from collections.abc import Callable

_MOST_LINKS = 40


class Names:
    """Absolute paths in a file system whose symbolic links `link_at` gives: a link's text, None for anything else.

    Folders' paths are remembered; `forget` when links or folders may have changed. Paths beneath `root` mean the
    same paths without it.
    """

    def __init__(self, link_at: Callable[[str], str | None], root: str | None = None) -> None:
        self.link_at, self._root = link_at, root
        self._folders: dict[str, str] = {"/": "/"}

    def forget(self) -> None:
        self._folders = {"/": "/"}

    def working_folder(self) -> str:
        return self.without_root(posix.getcwd())

    def without_root(self, path: str) -> str:
        """A path as the program is to see it."""
        if self._root is not None and path.startswith(self._root):
            return path[len(self._root) :] or "/"
        return path

    def name(self, path: str, folder_descriptor: int | None = None, *, follow: bool = True) -> str:
        """The absolute path of what `path` names; with `follow` of what a link at its end leads to.

        OSError (ELOOP) for links in a circle, FileNotFoundError for an empty path.
        """
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        path = self.without_root(path) if path[0] == "/" else f"{self._start(folder_descriptor)}/{path}"
        return self._resolved(path, 0, follow or path.endswith("/"))

    def _start(self, descriptor: int | None) -> str:
        if descriptor is None:
            return self.working_folder()
        return self.without_root(posix.readlink(f"/proc/self/fd/{descriptor}"))

    def _resolved(self, path: str, links: int, follow: bool = True) -> str:
        folder, _, last = path.rstrip("/").rpartition("/")
        if last in ("", ".", ".."):
            return self._folder(path, links)
        name = f"{self._folder(folder, links).rstrip('/')}/{last}"
        return self._followed(name, links) if follow else name

    def _followed(self, name: str, links: int) -> str:
        link = self.link_at(name)
        if link is None:
            return name
        if links == _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        path = self.without_root(link) if link.startswith("/") else f"{os.path.dirname(name)}/{link}"
        return self._resolved(path, links + 1)

    def _folder(self, path: str, links: int) -> str:
        known = self._folders.get(path)
        if known is not None:
            return known
        before, _, last = path.rstrip("/").rpartition("/")
        if not last:
            return "/"
        around = self._folder(before or "/", links)
        if last == ".":
            found = around
        elif last == "..":
            found = os.path.dirname(around)
        else:
            found = self._followed(f"{around.rstrip('/')}/{last}", links)
        self._folders[path] = found
        return found
