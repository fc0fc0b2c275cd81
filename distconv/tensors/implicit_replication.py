"""Plain tensors beside DTensors: distconv's DTensors treat them as replicated, a program's own as the program wants.

torch has one switch for this, which belongs to a thread and applies to all DTensors; C++ reads it for operators without
a rule. Once a thread uses distconv, its switch stays on. The program's own setting is kept here, and applies while an
operator runs on the program's own DTensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from distconv.tensors.replacements import replace, until_put_back, when_put_back


class _Thread(threading.local):
    ours = False  # Whether the switch is kept on for distconv.
    program = False
    """The value that the program has set, as with `torch.distributed.tensor.experimental.implicit_replication`."""


_thread = _Thread()


def mix_plain_tensors() -> None:
    """Makes a plain tensor beside one of distconv's DTensors count as replicated, in this thread from now on."""
    if not _thread.ours:
        dispatcher = DTensor._op_dispatcher
        _keep_what_the_program_sets()
        _thread.program, _thread.ours = dispatcher._allow_implicit_replication, True
        _switch.fset(dispatcher, True)
        when_put_back(as_before)


def as_before() -> None:
    """The switch of this thread is what the program has set."""
    if _thread.ours:
        _thread.ours = False
        _switch.fset(DTensor._op_dispatcher, _thread.program)


_switch: Any = type(DTensor._op_dispatcher).__dict__["_allow_implicit_replication"]  # torch's own property.


@until_put_back
def _keep_what_the_program_sets() -> None:
    def keep(dispatcher: Any, value: bool) -> None:
        _thread.program = value
        if not _thread.ours:
            _switch.fset(dispatcher, value)

    replace(type(DTensor._op_dispatcher), "_allow_implicit_replication", property(_switch.fget, keep))


@contextlib.contextmanager
def as_the_program_set() -> Iterator[None]:
    """A context in which torch's switch is what it would be without distconv."""
    if not _thread.ours or _thread.program:
        yield
        return
    dispatcher = DTensor._op_dispatcher
    _switch.fset(dispatcher, False)
    try:
        yield
    finally:
        _switch.fset(dispatcher, True)
