"""Processes that a benchmark asks to measure: a JSON object per line to them, an answer per line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from types import TracebackType
from typing import Any

ANSWER_SECONDS = 600.0


class Failed(RuntimeError):
    """A process ended or gave no answer."""


class Process:
    """Processes of which the first reads requests and prints answers."""

    def __init__(self, name: str, commands: list[list[str]], **environment: str) -> None:
        self.name = name
        quiet = {"KINETO_LOG_LEVEL": "99", "PYTHONWARNINGS": "ignore::FutureWarning"}
        set_here = {"OMP_NUM_THREADS": "1", **quiet, **environment}
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if index else subprocess.PIPE,
                stdout=subprocess.DEVNULL if index else subprocess.PIPE,
                env={**os.environ, **set_here},
                text=True,
                start_new_session=True,
            )
            for index, command in enumerate(commands)
        ]

    def ask(self, within: float = ANSWER_SECONDS, **request: Any) -> Any:
        """The answer to a request. Failed where there is none within so many seconds; then the process is of no use."""
        first = self._processes[0]
        assert first.stdin is not None and first.stdout is not None
        try:
            print(json.dumps(request), file=first.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(f"{self.name}: it ended, see above") from None
        if not select.select([first.stdout], [], [], within)[0]:
            raise Failed(f"{self.name}: no answer within {within:g} s to {request}")
        answer = first.stdout.readline()
        if not answer:
            raise Failed(f"{self.name}: it ended, see above")
        return json.loads(answer)

    def kill(self) -> None:
        """Ends the processes at once, and those that they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the processes: by the end of their input, or by force after some seconds."""
        first = self._processes[0]
        assert first.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            first.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        self.close()
