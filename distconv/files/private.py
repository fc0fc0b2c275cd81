"""Sets up the private files of a script when it starts on a rank, and removes them at its end."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing.spawn
import os
import posix
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distconv.files.first_rank import FirstRank
from distconv.files.functions import Files, Functions
from distconv.files.job_folder import make_folder, remove_folder
from distconv.files.layer import FileLayer
from distconv.files.libraries import translated, translator
from distconv.files.own_layer import OwnLayer
from distconv.files.view import FileView
from mucudnn.process import environment, substituted

APART = ("/dev/", "/proc/", "/sys/")


@contextlib.contextmanager
def files_of_rank(folder: str, rank: int) -> Iterator[None]:
    """A context in which the first rank's script writes real files, and every other rank's into a layer of its own.

    `folder` is the job's; ranks on a machine that cannot see it have one to themselves, and then they see what is on
    their own disks. A rank's layer is removed at the end, the job's folder by the last rank that leaves it.
    """
    if not os.path.isdir(folder):
        folder = make_folder()
    here = Path(folder, "ranks", str(rank))
    here.mkdir(parents=True)
    try:
        with _temporary_files(here / "tmp") if rank else contextlib.nullcontext(), _layers(folder, rank):
            yield
    finally:
        if posix.getcwd().startswith(str(here)):
            posix.chdir("/")
        shutil.rmtree(here, ignore_errors=True)
        with contextlib.suppress(OSError):
            here.parent.rmdir()  # fails while another rank is there
            remove_folder(folder)


@contextlib.contextmanager
def _layers(folder: str, rank: int) -> Iterator[None]:
    """A context in which file functions act on the files of a rank, also in processes that are spawned within it."""
    apart = (*APART, f"{folder}/")
    before, shared = FileLayer(f"{folder}/before"), FileLayer(f"{folder}/shared")
    files: Files = FirstRank(before, apart)
    if rank:
        files = OwnLayer(FileView(FileLayer(f"{folder}/ranks/{rank}/layer"), before, shared, apart))
    entering = f"from {__name__} import {enter_files.__name__}\n{enter_files.__name__}({folder!r}, {rank})"
    with _replaced(Functions(files, shared)), translated(translator(files)), spawned_with(entering):
        yield


_of_process = contextlib.ExitStack()


def enter_files(folder: str, rank: int) -> None:
    """From now on this process, which a rank has started, has that rank's files."""
    _of_process.enter_context(_layers(folder, rank))


@contextlib.contextmanager
def _temporary_files(folder: Path) -> Iterator[None]:
    folder.mkdir()
    with substituted(tempfile, tempdir=str(folder)), environment(TMPDIR=str(folder)):
        yield


@contextlib.contextmanager
def _replaced(functions: Functions) -> Iterator[None]:
    """Puts the replacements where the real functions are: in `os` and `builtins`, and in modules that took them."""
    new = {id(getattr(os, name)): function for name, function in functions.table().items()}
    new[id(builtins.open)] = functions.open_file
    with contextlib.ExitStack() as undo:
        for module in _programs():
            undo.enter_context(substituted(module, **_taken(module, new)))
        for owner in _classes():
            undo.enter_context(substituted(owner, **_taken(owner, new)))
        for known in [value for value in vars(os).values() if isinstance(value, set)]:
            known.update([new[id(function)] for function in known if id(function) in new])
            undo.callback(known.difference_update, new.values())
        # By paths, as a folder may be two on the disk.
        undo.enter_context(substituted(shutil, _use_fd_functions=False))
        yield


def _taken(owner: Any, new: dict[int, Any]) -> dict[str, Any]:
    """The attributes of a module or class that are functions with a replacement, by the number that `id` gives."""
    found = {}
    for name, value in list(vars(owner).items()):
        function = new.get(id(value.__func__ if type(value) is staticmethod else value))
        if function is not None:
            found[name] = staticmethod(function) if isinstance(owner, type) else function
    return found


def _classes() -> list[type]:
    """The standard library's classes that keep functions of `os`, as glob's do in Python 3.13."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("glob", "pathlib")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, type)]


def _programs() -> list[Any]:
    """The modules that are to see the replacements."""
    ours = __package__ + "."
    kept = ("posix", "_io", "importlib._bootstrap", "importlib._bootstrap_external")
    return [
        module
        for name, module in list(sys.modules.items())
        if hasattr(module, "__dict__") and name not in kept and not name.startswith(ours)
    ]


class _Beginning:
    """Among what such a process is given first: reading it enters the files of the rank."""

    def __init__(self, entering: str) -> None:
        self._entering = entering

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (self._entering,)


@contextlib.contextmanager
def spawned_with(entering: str) -> Iterator[None]:
    """A context in which such a process first runs some lines of Python, with this process's folders of modules."""
    usual: Any = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        lines = f"import sys\nsys.path[:] = {[str(folder) for folder in sys.path]!r}\n{entering}"
        return {"distconv": _Beginning(lines), **usual(name)}

    with substituted(multiprocessing.spawn, get_preparation_data=get_preparation_data):
        yield
