"""Finds the line of the program that called an operator, for errors; for backward, the line of its forward.

An operator of backward is called by autograd, where no line of the program is on the stack. So while a model is
called with inputs of shapes that it has not had before, the line of each operator is kept by the number that autograd
gives to the next node of its graph. Refusals are decided by shapes: later calls of the same shapes keep nothing.
"""

from __future__ import annotations

import bisect
import functools
import os
import sys
import sysconfig
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MOST_LINES = 200_000  # The most operators whose lines are kept; then those of earlier calls are dropped.

MOST_SHAPES = 1_000
"""The most shapes of a model's inputs that are known at once: in some programs every call has another one."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_BESIDE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_DISTCONV, _MUCUDNN = (os.path.join(_BESIDE, name, "") for name in ("distconv", "mucudnn"))
_NOT_THE_PROGRAMS = (_TORCH, _DISTCONV, _MUCUDNN, "<frozen")
_CALLS = (
    *(os.path.join(_DISTCONV, "model", f"{name}.py") for name in ("calls", "outermost_calls")),
    os.path.join(_TORCH, "nn", "modules", "module.py"),
    *(os.path.join(_DISTCONV, "turns", f"{name}.py") for name in ("turning", "call", "parts", "baton", "surroundings")),
)
_MAKERS = (
    *(os.path.join(_DISTCONV, "model", "new_tensors.py"), os.path.join(_DISTCONV, "job", "surroundings.py")),
    os.path.join(_DISTCONV, "tensors", "replacements.py"),
)
"""The files in which torch's functions that make a tensor are replaced."""

NEAR = 8  # For an operator that no rule saw, the line of one is shown that ran at most so many nodes before.

_PACKAGES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} if path
)

_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")

_kept: dict[int, str] = {}  # Lines of forward by autograd's number, ascending within a call.

_seen: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
"""For each model that was called, the shapes of its inputs."""


def asked_for() -> str:
    """``at FILE:LINE`` of the program for the operator that runs now; in backward that of its forward, where known."""
    if torch._C._current_graph_task_id() == -1:
        line = _line(sys._getframe(1))
        return f"at {line}" if line else "at a line that is not the program's"
    node = torch._C._current_autograd_node()
    what = f"in the backward ({node.name()})" if node is not None else "in the backward"
    forward = _forward_line(node._sequence_nr()) if node is not None else None
    if forward is not None:
        return f"{what} of the operator {forward}"
    line = _line(sys._getframe(1))
    return f"{what} called at {line}" if line else what


def is_asked_by_program() -> bool:
    """Whether the program makes a new tensor, and not torch or distconv, which know the layouts of their own."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _MAKERS and frame.f_back is not None:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAMS)


def keep_line(*_: Any) -> None:
    """Keeps the line of the operator that runs now."""
    line = _line(sys._getframe(1))
    if line:
        _kept[torch._C._autograd._get_sequence_nr()] = sys.intern(line)  # a program has few lines, and many operators


def is_new(model: nn.Module, shapes: Any) -> bool:
    """Whether a model is called for the first time with inputs of these shapes, and autograd records what it does."""
    known = _seen.setdefault(model, set())
    if shapes in known or not torch.is_grad_enabled():
        return False
    if len(known) >= MOST_SHAPES:
        known.clear()
    known.add(shapes)
    if len(_kept) > MOST_LINES:
        _kept.clear()
    return True


def _forward_line(number: int) -> str | None:
    """The line of the operator whose node has this number; the line was kept under the next number."""
    if number + 1 in _kept:
        return f"at {_kept[number + 1]}"
    numbers = sorted(_kept)
    before = bisect.bisect_right(numbers, number)
    return f"near {_kept[numbers[before - 1]]}" if before and number - numbers[before - 1] < NEAR else None


def program_lines(frame: types.FrameType | None) -> Iterator[tuple[str, bool]]:
    """The lines on a stack that are neither torch's nor ours, nor in Python's own modules, innermost first.

    Returns:
        ``FILE:LINE``, such as "train.py:41", and whether it is the program's own: of no package.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        is_pythons = file.startswith(_PYTHON) and not file.startswith(_PACKAGES)
        if not file.startswith(_NOT_THE_PROGRAMS) and not is_pythons:
            yield f"{_shown(file)}:{frame.f_lineno}", is_programs(file)
        frame = frame.f_back


def script_line(frame: types.FrameType | None = None) -> str:
    """The innermost line of the program, or of a package; "" where there is none.

    ``frame``: of another thread, whose line is wanted.
    """
    return next((line for line, _ in program_lines(frame or sys._getframe(1))), "")


def _line(frame: types.FrameType | None) -> str:
    """The innermost line that is neither torch's nor ours; where that is a package's, also the program's own."""
    found = ""
    for line, own in program_lines(frame):
        if own:
            return f"{found}, called at {line}" if found else line
        found = found or line
    return found


def line_of(error: BaseException, *, own: bool = False) -> str:
    """``FILE:LINE`` of the innermost line of the program, or of a package, that an exception came through.

    ``own``: whether it is to be the program's own, and no package's.
    """
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_packages = file.startswith(_PACKAGES) or not os.path.isabs(file)  # compiled modules have no absolute path
        if not file.startswith(_NOT_THE_PROGRAMS) and not (own and is_packages):
            found = f"{_shown(file)}:{number}"
    return found


def in_one_line(error: BaseException) -> str:
    """The type and the message of an exception, and the line of the program, or of a package, that it came through."""
    line = line_of(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{f' (at {line})' if line else ''}"


@functools.lru_cache(maxsize=1024)
def _shown(file: str) -> str:
    """A file as people know it: from the packages' folder, or from where the program runs."""
    for folder in (*_PACKAGES, os.path.join(os.getcwd(), "")):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file


@functools.lru_cache(maxsize=4096)
def is_programs(file: str) -> bool:
    """Whether a file of Python is the program's own: of no package, not of Python, and none that inductor writes."""
    if file.startswith((*_NOT_THE_PROGRAMS, *_PACKAGES, _PYTHON)):
        return False
    inductors = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
    return not file.startswith(inductors)


def is_programs_class(cls: type) -> bool:
    """Whether a class is the program's own."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ != "builtins" and is_programs(getattr(module, "__file__", None) or "")


def is_programs_module(module: types.ModuleType) -> bool:
    """Whether a module is a file of the program's own, or a folder of such files."""
    file = getattr(module, "__file__", None)
    return is_programs(file) if file else hasattr(module, "__path__")


def shorten(error: BaseException, refused: type[BaseException]) -> None:
    """Takes from an exception's traceback the frames that only pass calls on; of a refusal, all of torch and ours."""
    hidden = (_TORCH, _DISTCONV, threading.__file__) if isinstance(error, refused) else _CALLS
    entries, entry = [], error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(hidden):
            entries.append(entry)
        entry = entry.tb_next
    shown = None
    for entry in reversed(entries):
        shown = types.TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shown
