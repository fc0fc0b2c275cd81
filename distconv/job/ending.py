"""Ends a rank, and decides which rank reports the reason."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch.distributed as dist

from distconv import files
from distconv.job.launcher import BadInput
from distconv.job.notices import Notices, how_it_ended, shell_code
from distconv.job.output import Prefixed
from distconv.reading.fault import of_a_library
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.user_lines import line_of
from mucudnn import program

CAUSE_SECONDS = 6.0  # within which it becomes known why another rank does not answer any more
SAME_ERROR_SECONDS = 1.0  # within which the first rank fails, where it fails as another rank did
FAILURE_SECONDS = 1.0  # within which a failure becomes known, where ranks are known that ended well

_PACKAGES = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("distconv", "mucudnn"))
_SUBSTITUTES = (*files.__path__, *(str(Path(__file__).with_name(f"{n}.py")) for n in ("one_process", "random_state")))
"""The modules of substitutes for functions of Python and torch: their errors count as Python's and torch's."""

# Words of Gloo, NCCL and c10d in a RuntimeError where a rank that they wait for has gone.
_LOST = re.compile(r"gloo/|NCCL|c10d|Connection (closed|reset|refused) by peer|Broken pipe|\bsendBytes|\brecvBytes")

_KERNELS = re.compile(r"(Could not run '\S+' with arguments from the '\S+' backend\.).*")
"""Torch's error where an operator has no kernel for its tensors: a list of all kernels follows, in 3 KiB."""

WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed|exited unexpectedly)")
"""Torch's error, anywhere in the program, when a worker process of a DataLoader has gone."""


class Ending:
    """The end of this rank: its exit code, and whether it reports the reason.

    A failure is shown once: by the first rank that fails, or by rank 0 where that one fails with the same error, as
    most scripts do. A rank that fails only because another one has gone says nothing about itself; it reports how the
    other one ended, where that one's watcher has not done so yet, and has the same exit code.
    """

    def __init__(self, rank: int, shown: TextIO, *, reads_parts: bool = False) -> None:
        """``reads_parts``: whether the rank reads arrays in files: an error of a library in that is then one line."""
        self.code = 0
        self.notices: Notices | None = None
        self._rank, self._shown, self._reads_parts = rank, shown, reads_parts

    def explain(self, error: BaseException) -> None:
        """Sets the exit code for an exception that ended the script, and reports it if this rank is to do so."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it may arrive twice: from the terminal, and from the launcher
        try:
            self._explain(error)
        except KeyboardInterrupt:
            self.code = 128 + signal.SIGINT

    def _explain(self, error: BaseException) -> None:
        if isinstance(error, BadInput | program.NotFound):
            self.code = 2
            self._show(f"distconv: {error}\n")
        elif isinstance(error, SystemExit):
            self.code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code is not None and not isinstance(error.code, int):
                self._show(f"{error.code}\n")
        elif isinstance(error, KeyboardInterrupt):
            self.code = 128 + signal.SIGINT
        elif refusal := refusal_of(error):
            self.code = 2
            self._show(f"distconv: {refusal}\n")
        elif WORKER_DIED.search(str(error)):
            self.code = 1
            self._show(f"distconv: {' '.join(str(error).split())}\n", whose=True)
        else:
            self.code = 1
            if lost_another(error):
                reported = self._cause_reported()
            else:
                reported = self._first_rank_reports("".join(traceback.format_exception_only(error)))
            if not reported:
                line = _of_a_file(error) if self._reads_parts else None
                self._show(as_python_prints(error) if line is None else line, whose=True)

    def _first_rank_reports(self, error: str) -> bool:
        """Whether rank 0 fails with the same error, and so reports it as the script's error, not as one rank's."""
        if self.notices is None:
            return False
        self.notices.fail(self._rank, error)
        begin = time.monotonic()
        while self._rank and time.monotonic() - begin < SAME_ERROR_SECONDS and not self.notices.reported():
            if (first := self.notices.error(0)) is not None:
                return first == error
            time.sleep(0.02)
        return False

    def _cause_reported(self) -> bool:
        """Whether it is known which rank has gone; if so, that has been reported when this returns."""
        if self.notices is None:
            return False
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < CAUSE_SECONDS:
            reported = self.notices.reported()
            ended = {rank: code for rank, code in self.notices.endings().items() if rank != self._rank}
            failed = [rank for rank, code in ended.items() if code]
            if reported or failed or (ended and waited > FAILURE_SECONDS):
                culprit = next(iter(failed or ended), None)
                if culprit is not None:
                    # The culprit has noted its end, but its process may outlast this one, whose code is then the job's.
                    self.code = shell_code(ended[culprit]) or self.code
                    if not reported:
                        self._show(f"distconv: {how_it_ended(culprit, self.notices.size, ended[culprit])}\n")
                return True
            time.sleep(0.05)
        return False

    def _show(self, text: str, whose: bool = False) -> None:
        if self._rank == 0 if self.notices is None else self.notices.claim():
            sys.stdout.flush()
            note = f"distconv: on rank {self._rank} of {dist.get_world_size()}\n" if whose and self._rank else ""
            self._shown.write(text + note)
            self._shown.flush()

    def leave(self, mpi: bool) -> None:
        """Closes what this rank has open. A rank that failed ends here."""
        _flush()
        if self.notices is not None:
            self.notices.record(self._rank, self.code)
        if not self.code:
            dist.destroy_process_group()
        elif self.notices is not None and self.notices.size > 1:
            if not mpi:
                threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as Python does
                atexit._run_exitfuncs()
                _flush()
            # Without MPI_Finalize, which waits for messages that nobody sends, and without torch's own threads, which
            # abort the process where they end after the objects that they use.
            os._exit(self.code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Prefixed):
            stream.finish()
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def lost_another(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is that of a collective whose other ranks do not answer."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, dist.DistError) or type(cause).__module__.startswith("mpi4py"):
            return True
        if isinstance(cause, RuntimeError) and _LOST.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def refusal_of(error: BaseException) -> str | None:
    """One line for an error that distconv itself raised about the script's data or network; None for any other."""
    if not isinstance(error, ValueError | NotImplementedError):
        return None
    sources = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised = next((file for file in reversed(sources) if not file.startswith("<frozen")), "")
    ours = raised.startswith(_PACKAGES) and not raised.startswith(_SUBSTITUTES)
    if not ours and not isinstance(error, UnsupportedOperation):
        return None
    text, place = _KERNELS.sub(r"\1", " ".join(str(error).split())), line_of(error)
    return text if re.search(rf"{re.escape(place)}(?!\d)", text) else f"{place}: {text}"  # it may name the place itself


def _of_a_file(error: BaseException) -> str | None:
    """The line for an error of a library that reads arrays in files, with the script's line; None for other errors."""
    text = of_a_library(error)
    if text is None:
        return None
    place = line_of(error, own=True)
    return f"distconv: {f'{place}: ' if place else ''}{text}\n"


def as_python_prints(error: BaseException) -> str:
    """The traceback as Python prints it, from the script's first line to the last one that is not of a substitute."""
    trace = program.from_program(error.__traceback__)
    _cut_substitutes(trace)
    return "".join(traceback.format_exception(type(error), error, trace))


def _cut_substitutes(trace: TracebackType | None) -> None:
    last = None  # the last frame that belongs to no substitute
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_SUBSTITUTES):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
