"""Setting: what a user may choose, where it comes from, and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mucudnn.optimizer import POLICIES
from mucudnn.sizes import parse_bytes, parse_limit

MEMORY = ":memory:"  # The database path that means no file.

_UNPARSED: Any = object()
_ON = ("on", "1", "true", "yes")
_OFF = ("off", "0", "false", "no")
_LEVELS = ("debug", "info", "warning", "error", "critical")


class SettingError(ValueError):
    """A setting has a value that is not accepted; the message is one line."""


def _parse_database(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError
    path = os.fspath(value)
    if path == MEMORY:
        return path
    if not isinstance(path, str) or "\0" in path or os.path.isdir(os.path.expanduser(path)):
        raise ValueError
    return os.path.expanduser(path)


def one_of(*words: str) -> Callable[[object], str]:
    """Parses one of some words, in capitals or not."""

    def parse(value: object) -> str:
        for word in words:
            if isinstance(value, str) and value.strip().lower() == word.lower():
                return word
        raise ValueError

    return parse


def _parse_progress(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    word = value.strip().lower() if isinstance(value, str) else ""
    if word == "auto":
        return word
    if word in _ON or word in _OFF:
        return "on" if word in _ON else "off"
    raise ValueError


def parse_switch(value: object) -> bool:
    """Parses on and off, and other words for them."""
    return ("off", "on").index(_parse_progress(value)) == 1


def cache_folder() -> Path:
    """Where this system keeps what can be computed again; without platformdirs, where the XDG standard says."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (given if given.is_absolute() else Path.home() / ".cache") / "mucudnn"
    return Path(platformdirs.user_cache_dir("mucudnn", appauthor=False))


@dataclass(frozen=True)
class Setting:
    """One setting: where it comes from and what it accepts."""

    variable: str  # Its environment variable.
    default: Callable[[], str | None]  # Makes the text it has if nobody gives a value; `None` for nothing.
    accepted: str  # The values it takes, for people.
    meaning: str  # What it does, for people.
    parse: Callable[[object], Any]
    """The value from a given one. Raises ValueError, or SettingError with a longer text than `accepted`."""
    metavar: str = ""
    """What the value of its option of a command looks like, for help texts; "" for a setting without one."""
    _last: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def value(self, name: str, given: object) -> Any:
        """The value from what was given under `name`, an argument's or a variable's.

        Raises:
            SettingError: naming `name`, what was given and what is accepted.
        """
        try:
            return self.parse(given)
        except SettingError as error:
            raise SettingError(f"{name}: {error}") from None
        except (ValueError, OverflowError):
            raise SettingError(f"{name}={given!r}: accepted is {self.accepted}") from None

    def sourced(self, environ: Mapping[str, str]) -> tuple[Any, str]:
        """The value without an argument, and where it comes from: the variable's name, or "default".

        An empty variable counts as unset. None is the value of a setting without a default. Calls of a program ask so
        often that a text is parsed only where it is not that of the last time.
        """
        given = environ.get(self.variable)
        text = given or self.default()
        if text is None:
            return None, "default"
        value = self._last.get(text, _UNPARSED)
        if value is _UNPARSED:
            value = self.value(self.variable, text)
            self._last.clear()
            self._last[text] = value
        return value, self.variable if given else "default"


SETTINGS = {
    "workspace_limit": Setting(
        "MUCUDNN_WORKSPACE_LIMIT",
        lambda: "64MiB",
        "a number of bytes, alone or with a unit (67108864, 64MiB, 1GB), unlimited, or peak",
        "the scratch memory that one convolution may use; peak: as much as does not raise the peak of a step; 0: none",
        parse_limit,
        "BYTES",
    ),
    "memory_limit": Setting(
        "MUCUDNN_MEMORY_LIMIT",
        lambda: None,
        "a number of bytes, alone or with a unit (10737418240, 10GiB), or unlimited",
        "the memory that the whole program may use; each convolution may use what is free at its moment of a step",
        parse_bytes,
        "BYTES",
    ),
    "total_workspace_size": Setting(
        "MUCUDNN_TOTAL_WORKSPACE_SIZE",
        lambda: None,
        "a number of bytes, alone or with a unit (536870912, 512MiB, 2GB), or unlimited",
        "the scratch memory of all convolutions together, each with its own; if unset, they reuse the same memory",
        parse_bytes,
        "BYTES",
    ),
    "policy": Setting(
        "MUCUDNN_BATCH_SIZE_POLICY",
        lambda: "powerOfTwo",
        f"one of {', '.join(POLICIES)}",
        "the sizes of micro-batches that are tried",
        one_of(*POLICIES),
        "NAME",
    ),
    "planning": Setting(
        "MUCUDNN_PLANNING",
        lambda: "auto",
        "auto, ahead or live",
        "measure algorithms ahead of a convolution's first call, or live, on its calls; auto: live on a processor",
        one_of("auto", "ahead", "live"),
        "WHEN",
    ),
    "database": Setting(
        "MUCUDNN_DATABASE",
        lambda: str(cache_folder() / "times.sqlite"),
        f"the path of a file (not of a directory) or {MEMORY}",
        "the file of measured times",
        _parse_database,
        "PATH",
    ),
    "engines": Setting(
        "MUCUDNN_ENGINES",
        lambda: "heuristic",
        "heuristic or all",
        "the engines of cuDNN that are tried: the best that its heuristics propose, or all",
        one_of("heuristic", "all"),
    ),
    "check": Setting(
        "MUCUDNN_CHECK",
        lambda: "on",
        "on or off",
        "check an algorithm's result before it is used: compare it and torch's own with float64",
        parse_switch,
    ),
    "count_stock": Setting(
        "MUCUDNN_COUNT_STOCK",
        lambda: "off",
        "on or off",
        "count the scratch memory of torch's own kernels within the limit; they are then measured ahead",
        parse_switch,
    ),
    "progress": Setting(
        "MUCUDNN_PROGRESS",
        lambda: "auto",
        "auto, on or off",
        "show a progress bar while measuring; auto: on a terminal",
        _parse_progress,
        "WHEN",
    ),
    "log": Setting(
        "MUCUDNN_LOG",
        lambda: None,
        f"one of {', '.join(_LEVELS)}",
        "the lowest level of log lines on stderr; if unset, logging is left to the program",
        one_of(*_LEVELS),
        "LEVEL",
    ),
}
"""Every setting by its name in `patch`."""

VARIABLES = tuple(setting.variable for setting in SETTINGS.values())  # The environment variables that are read.
