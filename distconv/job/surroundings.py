"""Runs a script on every rank as in one process: with the same random numbers and files, and without sight of ranks."""

from __future__ import annotations

import contextlib
import ctypes.util
import hmac
import os
import platform
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.utils._device import _device_constructors

from distconv import settings
from distconv.files.job_folder import FOLDER_VARIABLE, key_of, make_folder
from distconv.files.private import files_of_rank
from distconv.job.attempt import prefix, without_prefix
from distconv.job.one_process import one_process
from distconv.job.random_state import State, as_text, common_entropy, from_text, set_generators, state_of_generators
from distconv.model.traces import known_to_script
from distconv.place.addresses import is_on_one_machine
from distconv.private_names import UNWRITTEN, lacks
from distconv.tensors.replacements import in_place_of
from distconv.tensors.user_lines import is_asked_by_program, program_lines
from mucudnn.process import print_line, substituted, warn


@contextlib.contextmanager
def surroundings(store: Store, *, show_ranks: bool = False) -> Iterator[None]:
    """A context in which a script runs on every rank with the first rank's random state, sees one process, and leaves
    the files that one process leaves.

    Every rank of the job must call it, once. With `show_ranks` the script sees all ranks.
    """
    generators, entropy, folder = _first_ranks(store, os.environ.pop(FOLDER_VARIABLE, None))
    set_generators(generators, every_device=True)
    with contextlib.ExitStack() as around:
        around.enter_context(common_entropy(entropy))
        around.enter_context(zeros_for_unwritten())
        around.enter_context(files_of_rank(folder, dist.get_rank()))
        _wait_for_all(store)  # from here on the first rank's changes are noted, and every rank can read them
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            around.enter_context(starts_reported())
        if not show_ranks:
            around.enter_context(one_process())
        yield


def _first_ranks(store: Store, given: str | None) -> tuple[State, bytes, str]:
    """The first rank's random state, entropy and job folder, on every rank before the script starts.

    It is sent as text: whoever can reach the store could write to it, and reading a pickle could run code. `given`: the
    folder, if the launcher has made it. Else its name comes from the store, and each rank that sees it checks whether
    it is this job's. Ranks of one machine read the entropy's key from it; for other ranks the key is in the store, and
    is combined with the job's secret, which the store does not have.
    """
    names = [f"distconv/start/{what}" for what in ("generators", "folder", "entropy", "check")]
    job = "" if given is not None else _name(store)
    together = given is not None or is_on_one_machine()
    secret = settings.value("secret") or b""
    if dist.get_rank() == 0:
        folder = given or make_folder(job)
        own = key_of(folder, job)
        values = (
            as_text(state_of_generators()),
            folder.encode(),
            b"in the folder" if together else own,
            _check(_key(secret, own)),
        )
        for name, value in zip(names, values, strict=True):
            store.set(name, value)  # type: ignore[arg-type]  # bytes serve too
    generators, named, sent, check = (bytes(store.get(name)) for name in names)
    folder = given or named.decode()
    key = _key(secret, key_of(folder, job) if together or os.path.lexists(folder) else sent)
    if not hmac.compare_digest(_check(key), check):
        raise RuntimeError(
            "this rank has another key for its random numbers than the first rank; accepted: on all machines of a job"
            " the same file of DISTCONV_SECRET, or none, and a store to which nobody else writes"
        )
    return from_text(generators), key, folder


def _name(store: Store) -> str:
    """A name of the job that no other job of the machine has, from the address of its store."""
    found = without_prefix(store)
    where = f"{found.host} {found.port}" if isinstance(found, TCPStore) else ""
    return f"{where} {prefix('files')}"


def _key(secret: bytes, found: bytes) -> bytes:
    return hmac.digest(secret, found, "sha256")


def _check(key: bytes) -> bytes:
    """A hash that shows whether ranks have the same key, without the key."""
    return hmac.digest(key, b"check", "sha256").hex().encode()


def _wait_for_all(store: Store) -> None:
    if store.add("distconv/ready", 1) == dist.get_world_size():
        store.set("distconv/all ready", "yes")
    store.get("distconv/all ready")


_ASKING = {platform.__file__, uuid.__file__, ctypes.util.__file__}
"""The modules of Python that start programs, such as uname, to ask about the machine: these write nothing."""


@contextlib.contextmanager
def starts_reported() -> Iterator[None]:
    """A context in which each line of the script that starts a program, by `subprocess` or `os.system`, is named once,
    on stderr: every rank starts its own."""
    known: set[str] = set()

    def reported(start: Callable[..., Any], place: int) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            line = next((line for line, own in program_lines(sys._getframe(1)) if own), "")
            asks = any(frame.f_code.co_filename in _ASKING for frame, _ in traceback.walk_stack(None))
            if line and line not in known and not asks:
                known.add(line)
                name = _program_name([*args, *kwargs.values()][place])
                print_line(
                    f"distconv: {line}: every rank starts {name}, and what it writes is written by each of them; under"
                    " `if distconv.is_first():` it starts once"
                )
            return start(*args, **kwargs)

        return started

    begin: Any = subprocess.Popen.__init__
    with substituted(subprocess.Popen, __init__=reported(begin, 1)), substituted(os, system=reported(os.system, 0)):
        yield


def _program_name(given: Any) -> str:
    """The name of the program in a command: a text, a path, or a list that begins with one."""
    first = given if isinstance(given, str | bytes | os.PathLike) else next(iter(given), "")
    return os.path.basename(os.fsdecode(first).partition(" ")[0]) or "a program"


_MAKERS = (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")


@contextlib.contextmanager
def zeros_for_unwritten() -> Iterator[None]:
    """A context in which tensors without values are zeros if the program has asked for them: they would differ from
    rank to rank. Tools that count the operators of a model run it on such tensors."""
    if line := lacks(UNWRITTEN):
        warn(line, "distconv")
        yield
        return
    _device_constructors()  # torch keeps which functions `with torch.device(...)` concerns: the ones of now
    with contextlib.ExitStack() as undo:
        for owner, name in _MAKERS:
            real = getattr(owner, name)
            undo.enter_context(substituted(owner, **{name: known_to_script(in_place_of(real, _filled), real)}))
        yield


def _filled(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = make(*args, **kwargs)
    if torch.compiler.is_compiling():
        return result
    if is_asked_by_program():  # torch and distconv write to all that they ask for
        with torch.no_grad():
            result.zero_()
    return result
