"""Runs another program in this process, as plain python runs it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any


class NotFound(Exception):
    """There is no such program; the message is one line."""


@dataclass(frozen=True)
class Program:
    """A script or a module that can be run once."""

    name: str  # Its `sys.argv[0]`.
    place: str  # Its `sys.path[0]`.
    code: Callable[[], CodeType]  # Compiles it.
    attributes: dict[str, Any] = field(default_factory=dict)  # What its `__main__` has from the start.
    always_on_path: bool = False  # Whether it needs `place` on the path under `python -P` too.

    def run(self, arguments: Sequence[str]) -> None:
        """Runs it as `__main__`, with `arguments` behind its name in `sys.argv`.

        Whatever it raises comes out, `SystemExit` and `KeyboardInterrupt` too. If nobody catches that, python prints
        the traceback that it would print without this function, and ends as it would.
        """
        main = ModuleType("__main__")
        main.__dict__.update(self.attributes, __builtins__=builtins)
        sys.modules["__main__"] = main
        sys.argv[:] = [self.name, *arguments]
        _put_on_path(self.place, self.always_on_path)
        try:
            exec(self.code(), main.__dict__)
        except SystemExit:
            raise
        except BaseException:
            _print_from_program_on()
            raise


def script(path: str) -> Program:
    """What `python PATH` runs: a file, or a directory or zip archive with a `__main__.py`.

    Raises:
        NotFound: if it cannot be read.
    """
    absolute = os.path.abspath(path)
    if os.path.isdir(absolute) or zipfile.is_zipfile(absolute):
        spec = PathFinder.find_spec("__main__", [absolute])
        if spec is None:
            raise NotFound(f"cannot run {path}: it has no __main__.py")
        return _of_spec(spec, path, absolute, always_on_path=True)
    try:
        with open(absolute, "rb") as file:
            source = file.read()
    except OSError as error:
        raise NotFound(f"cannot run {path}: {error.strerror}") from error
    attributes = {"__file__": absolute, "__cached__": None, "__loader__": SourceFileLoader("__main__", absolute)}
    place = os.path.dirname(os.path.realpath(path))
    return Program(path, place, partial(compile, source, absolute, "exec", dont_inherit=True), attributes)


def module(name: str) -> Program:
    """What `python -m NAME` runs: a module, or the `__main__` of a package.

    Raises:
        NotFound: if there is none of that name.
    """
    if name.startswith("."):
        raise NotFound(f"cannot run module {name}: accepted are absolute names")
    here = os.getcwd()
    _put_on_path(here)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # of an empty name, or of a module without a spec
        spec = None
    if spec is None or not spec.has_location:
        raise NotFound(f"cannot run module {name}: there is none of that name")
    return _of_spec(spec, spec.origin or name, here)


def _of_spec(spec: ModuleSpec, name: str, place: str, always_on_path: bool = False) -> Program:
    loader: Any = spec.loader
    attributes = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": spec.parent,
    }
    return Program(name, place, partial(loader.get_code, spec.name), attributes, always_on_path)


def _put_on_path(place: str, always: bool = False) -> None:
    """In the place of what python put there for the program that it was started with; `python -P` put nothing."""
    if not sys.flags.safe_path:
        sys.path[0] = place
    elif always:
        sys.path.insert(0, place)


def from_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on; the whole of one that does not come from a program."""
    below = trace
    while below is not None and below.tb_frame.f_code is not Program.run.__code__:
        below = below.tb_next
    return trace if below is None else below.tb_next


def _print_from_program_on() -> None:
    """Leaves the frames above and of `Program.run` out of the traceback that an uncaught exception prints."""
    hook = sys.excepthook

    def shortened(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = from_program(trace)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = shortened
