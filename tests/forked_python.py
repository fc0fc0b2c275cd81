"""Python in processes that are forked from one that has imported torch, for tests of what a script prints and leaves.

Importing torch takes more processor time than most such scripts. Tests of how Python starts use `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import marshal
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

IMPORTED = ("numpy", "torch", "torch.distributed.tensor", "torch._dynamo")
IMPORTED_FOR_JOBS = ("distconv", "distconv.commands.run", "distconv.model.interface", "distconv.job.script")
PLACE = Path(__file__).with_name("forked_place.py")

JOB = ["-m", "distconv", "run"]
MARK = "MARK_OF_THE_TEST"
"""A variable: the name of a process that was forked with it is its beginning, as its environment is not to be seen."""

_SET_NAME, NAME_LENGTH = 15, 15  # prctl's option, and what the kernel keeps of a name


class Request(NamedTuple):
    """The words behind `python`: a script, `-m` and a module, or `-c` and code, and their arguments."""

    words: list[str]
    folder: str
    environment: dict[str, str]


def run_python(
    *words: object, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: int = 240
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], capture_output=True, text=True)` gives, with nothing to read."""
    return subprocess.run(
        [forked_python(), *map(str, words)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@functools.cache
def forked_python() -> str:
    """A program that does what `sys.executable` does, for tests, mpiexec or torchrun, as long as this process lives."""
    from distconv.job.launcher import mpiexec

    folder = tempfile.TemporaryDirectory(prefix="forked-python-")
    python = _program(folder.name, "python", [sys.executable, "-IS", str(PLACE), folder.name])
    with contextlib.suppress(FileNotFoundError):
        _program(folder.name, "mpiexec", mpiexec(1)[:1])  # it is looked for beside Python
    ours, theirs = socket.socketpair()  # those that fork end when it is closed
    files = [theirs.detach(), *(_listening(os.path.join(folder.name, name)) for name in ("scripts", "jobs"))]
    subprocess.Popen([sys.executable, __file__, python, *map(str, files)], pass_fds=files, stdin=subprocess.DEVNULL)
    for file in files:
        os.close(file)
    _kept.extend([folder, ours])
    return python


_kept: list[Any] = []  # as long as this process


def _program(folder: str, name: str, words: list[str]) -> str:
    program = Path(folder, name)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return str(program)


def _listening(address: str) -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    return listener.detach()


def _serve(python: str, line: int, scripts: int, jobs: int) -> None:
    """Forks processes that do what is asked for, and in each of them does it.

    Those for jobs are forked from a process of their own, which imports distconv, too: a plain script does without it.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in given]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import(IMPORTED)
    sys.executable = python  # what a process starts in turn is forked, too
    if os.fork():
        os.close(jobs)
        request = _requested(line, scripts, ())
    else:
        os.close(scripts)
        request = _requested(line, jobs, IMPORTED_FOR_JOBS)
    _run(request, path)


def _import(names: Sequence[str]) -> None:
    """Imports modules; no collection of garbage looks through them."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _requested(line: int, listener: int, needed: Sequence[str]) -> Request:
    """The next request, in a process that was forked for it. What is needed is imported when there is a first one."""
    imported = not needed
    with socket.socket(fileno=listener) as listening:
        while True:
            ready, _, _ = select.select([line, listening], [], [])
            if line in ready:
                os._exit(0)
            if not imported:
                sys.path.insert(0, str(PLACE.parents[1]))
                _import(needed)
                imported = True
            place, _ = listening.accept()
            if os.fork() == 0:
                break
            place.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    os.close(line)
    return _answered(place)


def _answered(place: socket.socket) -> Request:
    """The request of a place, in a forked process that has its files. The process that forks it stays beside it."""
    told, files, _, _ = socket.recv_fds(place, 8, 4)
    with place.makefile("rb") as reading:
        request = Request(*marshal.loads(reading.read(int.from_bytes(told, "big"))))
    child = os.fork()
    if child == 0:
        place.close()
        os.setsid()
        for file in range(3):
            os.dup2(files[file], file)
            os.close(files[file])
        if "PMI_FD" in request.environment:
            request.environment["PMI_FD"] = str(files[3])
        return request
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(child)
    place.sendall(f"{child}\n".encode())
    if ended not in select.select([place, ended], [], [])[0]:  # the place was killed
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        place.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(request: Request, path: Sequence[str]) -> None:
    """Runs what is asked for, as the main module of this process."""
    torch, numpy = (importlib.import_module(name) for name in ("torch", "numpy"))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    if MARK in os.environ:
        ctypes.CDLL(None).prctl(_SET_NAME, os.environ[MARK].encode())
    tempfile.tempdir = None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    random.seed()
    numpy.random.seed()
    unbuffered = request.words[0] == "-u"
    words = request.words[unbuffered:]
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)  # type: ignore[union-attr]
    first, *rest = words
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    beside = {"-m": request.folder, "-c": ""}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [beside, *given, *path]
    sys.orig_argv[:] = [sys.executable, *words]
    sys.argv[:] = [first, *rest[1:]] if first in ("-c", "-m") else words
    if words[:3] == JOB:
        _fork_for_ranks(path)
        if "distconv" in sys.modules:
            importlib.reload(sys.modules["distconv"])  # what it does when a rank imports it
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")


def _fork_for_ranks(path: Sequence[str]) -> None:
    """Forks this process where `distconv run` would start one that parts in ranks, whose parent it has to be."""
    from distconv.job.processes import ForkedChild

    start = subprocess.Popen

    def start_or_fork(words: list[str], **options: Any) -> Any:
        if words[:4] != [sys.executable, *JOB]:
            return start(words, **options)
        child = os.fork()
        if child:
            return ForkedChild(child)
        subprocess.Popen = start  # type: ignore[misc]
        atexit._clear()
        os._exit(_exit_code(Request(words[1:], os.getcwd(), options["env"]), path))

    subprocess.Popen = start_or_fork  # type: ignore[assignment, misc]


def _exit_code(request: Request, path: Sequence[str]) -> int:
    """Runs what is asked for in the midst of another program, and ends as Python does."""
    code = 0
    try:
        _run(request, path)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:]))
