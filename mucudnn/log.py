"""Where the lines of the logger "mucudnn" go."""

from __future__ import annotations

import logging
import sys

_LOGGER = logging.getLogger("mucudnn")

_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("mucudnn %(levelname)s: %(message)s"))


def to_stderr(level: str | None) -> None:
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
