"""Where the lines of the logger "mucudnn" go."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("mucudnn")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that `to_stderr` adds, and by its class finds again."""


def to_stderr(level: str | None) -> None:
    """Sends lines of at least `level` to stderr and nowhere else; `None` leaves them to the program's own logging."""
    for handler in [handler for handler in _LOGGER.handlers if isinstance(handler, _Stderr)]:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(logging.NOTSET)
        _LOGGER.propagate = True
    if level is None:
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("mucudnn %(levelname)s: %(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False
