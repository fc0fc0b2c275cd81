"""Switches the division of torch's convolutions on and off in this process: `patch` and its relatives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from mucudnn.reporting.record import Record
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import VARIABLES, Given, Settings
from mucudnn.spelling import report_unknown
from mucudnn.timing.board import Board

_LOGGER = logging.getLogger("mucudnn")

_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("mucudnn %(levelname)s: %(message)s"))


def patch(**settings: Unpack[Given]) -> None:
    """Divides torch's convolutions from here on, in all threads; called again, it starts anew with other settings.

    What is not given comes from the environment (`MUCUDNN_WORKSPACE_LIMIT`, ...), else from the defaults.

    Args:
        workspace_limit: scratch memory that one convolution may use, in bytes: a number or "64MiB", "1GB", "unlimited";
            "peak": as much as does not raise the peak memory of a training step; 0 leaves everything to torch.
        memory_limit: bytes that all of the program's memory may come to: each convolution may use what is free at its
            moment of a training step.
        total_workspace_size: bytes that the workspaces of all convolutions may add up to, each layer and direction
            having its own; if not given, they reuse one of `workspace_limit`.
        policy: the micro-batch sizes that are tried: "undivided", "powerOfTwo" or "all".
        planning: "ahead": algorithms are measured before a convolution's first call; "live": on the program's own
            calls, each computed by the algorithm that is tried; "auto": live on a processor, ahead on a GPU and where
            torch is asked for deterministic algorithms.
        database: the file of measured times, or ":memory:".
        engines: of cuDNN that are tried on a GPU: "heuristic", those that it proposes, or "all".
        check: "on" or "off": whether an algorithm's results are checked before it is used.
        count_stock: "on" or "off": whether the scratch memory of torch's own kernels counts within `workspace_limit`;
            it is measured by one profiled call of each, so planning is ahead.
        progress: "auto", "on" or "off": a progress bar while measuring.
        log: the least level of log lines that go to stderr.

    Raises:
        ValueError: for a value that is not accepted; one line names it and what is.
        TypeError: for a name that is no setting.
    """
    report_unknown("MUCUDNN", VARIABLES)
    session = _session(None, settings)
    before = shim.install(session)
    if before is not None:
        before.close()


def unpatch() -> None:
    """Leaves torch as it was before `patch`."""
    before = shim.install(None)
    if before is not None:
        before.close()


@contextmanager
def patched(*, board: Board | None = None, **settings: Unpack[Given]) -> Iterator[Session]:
    """`patch` for a while; afterwards convolutions are as they were before. The settings are those of `patch`.

    ``board``: where processes that run the same program share what they measure, and so come to the same plans.

    Yields:
        The session, whose `records()` are those of `report()`, also after the end.
    """
    session = _session(board, settings)
    before = shim.install(session)
    try:
        yield session
    finally:
        shim.install(before)
        session.close()


def is_patched() -> bool:
    """Whether convolutions are divided now."""
    return shim.current_session() is not None


def report() -> list[Record]:
    """The records of all convolutions called since `patch`, in the order of first calls; empty where not patched."""
    session = shim.current_session()
    return session.records() if session is not None else []


def _session(board: Board | None, given: Given) -> Session:
    settings = Settings.from_environment(**given)
    log_to_stderr(settings.log)
    return Session(settings, board)


def log_to_stderr(level: str | None) -> None:
    """Sends lines of at least `level` to stderr and nowhere else; `None` leaves them to the program's own logging."""
    if level is not None:
        _handler.stream = sys.stderr
        _LOGGER.addHandler(_handler)
        _LOGGER.setLevel(level.upper())
        _LOGGER.propagate = False
    elif _handler in _LOGGER.handlers:
        _LOGGER.removeHandler(_handler)
        _LOGGER.setLevel(logging.NOTSET)
        _LOGGER.propagate = True
