"""Python in processes that are forked from one that has imported torch, for tests of what a script prints and leaves.

Importing torch takes more processor time than most such scripts. Tests of how Python starts use `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
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
from typing import Any, NamedTuple, NoReturn

IMPORTED = ("numpy", "torch", "torch.distributed.tensor", "torch._dynamo")
LATE = "late"


class Request(NamedTuple):
    """The words behind `python`: a script, `-m` and a module, or `-c` and code, and their arguments."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    seconds: int
    forks: bool


def run_python(
    *words: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: int = 240,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], capture_output=True, text=True)` gives, with nothing to read.

    forks: whether the process is forked, too, where it would start `python -m`, as `distconv run` does for its ranks.
    """
    environment = dict(os.environ if env is None else env)
    asked = Request([*map(str, words)], str(cwd or Path.cwd()), environment, timeout, forks)
    server = _server()
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        request.write(json.dumps(asked).encode())
        request.flush()
        socket.send_fds(server, [b"r"], [request.fileno(), out.fileno(), errors.fileno()])
        answer = server.recv(64).decode()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    if answer == LATE:
        raise subprocess.TimeoutExpired(asked.words, timeout, *texts)
    return subprocess.CompletedProcess(asked.words, int(answer), *texts)


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that forks, which ends when it is closed."""
    ours, theirs = socket.socketpair()
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    theirs.close()
    return ours


def _requested(requests: socket.socket) -> Request:
    """The request, in a process that was forked for it."""
    while True:
        _, files, _, _ = socket.recv_fds(requests, 1, 3)
        if not files:
            sys.exit()
        with open(files[0], "rb") as file:
            file.seek(0)
            request = Request(*json.load(file))
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(files[1], 1)
            os.dup2(files[2], 2)
        for file_of_output in files[1:]:
            os.close(file_of_output)
        if child == 0:
            requests.close()
            return request
        requests.sendall(_outcome(child, request.seconds).encode())


def _outcome(child: int, seconds: int) -> str:
    """The exit code of a process, as text; LATE for one that had to be killed."""

    def late(*_: Any) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        _, status = os.waitpid(child, 0)
    except TimeoutError:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return LATE
    finally:
        signal.alarm(0)
    return str(os.waitstatus_to_exitcode(status))


def _run(request: Request, path: Sequence[str]) -> None:
    """Runs what is asked for, as the main module of this process."""
    torch, numpy = (importlib.import_module(name) for name in ("torch", "numpy"))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    random.seed()
    numpy.random.seed()
    first, *rest = request.words
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    beside = {"-m": request.folder, "-c": ""}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [beside, *given, *path]
    sys.argv[:] = ["-c", *rest[1:]] if first == "-c" else rest if first == "-m" else request.words
    if request.forks:
        _fork_for_modules(path)
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")


def _fork_for_modules(path: Sequence[str]) -> None:
    """Forks this process where `subprocess.Popen` would start `python -m`, as a child with the same output."""
    from distconv.job.processes import ForkedChild

    start = subprocess.Popen

    def start_or_fork(words: list[str], **options: Any) -> Any:
        if words[:2] != [sys.executable, "-m"]:
            return start(words, **options)
        child = os.fork()
        if child:
            return ForkedChild(child)
        subprocess.Popen = start  # type: ignore[misc]
        atexit._clear()
        os._exit(_exit_code(Request(words[1:], os.getcwd(), options["env"], seconds=0, forks=False), path))

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


def _serve(descriptor: int) -> None:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in given]
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _run(_requested(socket.socket(fileno=descriptor)), path)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
