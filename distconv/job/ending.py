"""How a rank ends, and which rank tells why."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.job.output import Prefixed
from distconv.refusal import UnsupportedOperation
from mucudnn import program

ALIKE_SECONDS = 2.0  # within which ranks that fail for the same reason all have failed

_PACKAGES = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("distconv", "mucudnn"))
_STAND_INS = tuple(str(Path(__file__).with_name(name)) for name in ("files", "one_process.py", "random_state.py"))
"""What stands in for functions of Python and torch: its errors are theirs."""


class Ending:
    """How this rank ends: with which code, and which rank tells why."""

    def __init__(self, rank: int, shown: TextIO) -> None:
        self.code = 0
        self.store: Store | None = None
        self._rank, self._shown = rank, shown

    def show(self, text: str, whose: bool = False) -> None:
        if self.store is None:
            first = self._rank == 0
        else:
            try:
                first = self.store.add("distconv/shown", 1) == 1
            except dist.DistError:
                first = False  # the rank that held the store has ended, and with it the job
        if first:
            sys.stdout.flush()
            note = f"distconv: on rank {self._rank} of {dist.get_world_size()}\n" if whose and self._rank else ""
            self._shown.write(text + note)
            self._shown.flush()

    def leave(self, mpi: bool) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Prefixed):
                stream.finish()
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if not self.code:
            dist.destroy_process_group()
        elif mpi and self.store is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Where all ranks fail alike each ends by itself. One that fails alone ends the others, which wait for it.
            if not self._all_failed(self.store):
                from distconv.mpi.world import WORLD

                WORLD.Abort(self.code)
            os._exit(self.code)  # without MPI_Finalize, which waits for messages that will not come

    def _all_failed(self, store: Store) -> bool:
        deadline = time.monotonic() + ALIKE_SECONDS
        try:
            failed = store.add("distconv/failed", 1)
            while failed < dist.get_world_size():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
                failed = store.add("distconv/failed", 0)
            if self._rank == 0:
                time.sleep(0.2)  # the store is here
        except dist.DistError:
            return True
        return True


def refusal_of(error: BaseException) -> str | None:
    """One line for an error that distconv itself raised about the script's data or network; None for any other."""
    if not isinstance(error, ValueError | NotImplementedError):
        return None
    frames = list(_frames(error.__traceback__))
    if not frames or not frames[-1][0].startswith(_PACKAGES):
        return None
    if frames[-1][0].startswith(_STAND_INS) and not isinstance(error, UnsupportedOperation):
        return None
    places = [(name, line) for name, line in frames if not name.startswith(_PACKAGES) and "/torch/" not in name]
    text = " ".join(str(error).split())
    return f"{os.path.relpath(places[-1][0])}:{places[-1][1]}: {text}" if places else text


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<frozen"):
            yield name, trace.tb_lineno
        trace = trace.tb_next


def as_python_prints(error: BaseException) -> str:
    """As python prints it: from the script's first line on, to the last one that is not a stand-in's."""
    trace = program.from_program(error.__traceback__)
    _cut_stand_ins(trace)
    return "".join(traceback.format_exception(type(error), error, trace))


def _cut_stand_ins(trace: TracebackType | None) -> None:
    last = None  # the last frame that belongs to no stand-in
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_STAND_INS):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
