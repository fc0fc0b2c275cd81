"""Settings: what a user may choose, through the environment or through `patch`, and what is accepted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict

from mucudnn.optimizer import POLICIES
from mucudnn.sizes import PEAK, format_bytes, parse_bytes, parse_limit

MEMORY = ":memory:"  # The database path that means no file.

_UNPARSED: Any = object()
_WORDS = {"auto": "auto"} | dict.fromkeys(("on", "1", "true", "yes"), "on")
_WORDS |= dict.fromkeys(("off", "0", "false", "no"), "off")
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
    word = str(value).strip().lower() if isinstance(value, str | bool) else ""
    if word not in _WORDS:
        raise ValueError
    return _WORDS[word]


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


class Given(TypedDict, total=False):
    """What a program may give for the settings, by their names; `mucudnn.patch` says what they mean."""

    workspace_limit: str | float | None
    memory_limit: str | float | None
    total_workspace_size: str | float | None
    policy: str | None
    planning: str | None
    database: str | os.PathLike[str] | None
    engines: str | None
    check: str | bool | None
    count_stock: str | bool | None
    progress: str | bool | None
    log: str | None


@dataclass(frozen=True)
class Settings:
    """The settings of one `patch`, which says what they mean. `math.inf` is no limit, `None` what nobody asked for."""

    workspace_limit: float  # Where only a total is given, that; `PEAK`: what does not raise the peak memory of a step.
    memory_limit: float | None
    total_workspace_size: float | None
    policy: str
    planning: str
    database: str
    engines: str
    check: bool
    count_stock: bool
    progress: str
    log: str | None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """For every setting, what gave its value: "argument", the environment variable's name, or "default"."""

    @property
    def is_by_step(self) -> bool:
        """Whether budgets come from the memory that a step leaves."""
        return self.workspace_limit is PEAK or self.memory_limit is not None

    @property
    def has_limit(self) -> bool:
        """Whether the user asks for a limit of memory of any kind."""
        limits = ("workspace_limit", "memory_limit", "total_workspace_size", "count_stock")
        return any(self.sources.get(name) != "default" for name in limits)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, /, **overrides: object) -> Self:
        """The settings from environment variables, `overrides` winning over them and `None` meaning "not given".

        An empty variable counts as unset.

        Raises:
            SettingError: for a value that is not accepted.
            TypeError: for an override that is no setting.
        """
        for name in overrides:
            if name not in SETTINGS:
                raise TypeError(f"{name!r} is no setting: there are {', '.join(SETTINGS)}")
        values, sources = {}, {}
        for name, setting in SETTINGS.items():
            if overrides.get(name) is not None:
                values[name], sources[name] = setting.value(name, overrides[name]), "argument"
            else:
                values[name], sources[name] = setting.sourced(environ)
        alone = sources["workspace_limit"] == "default"
        total = values["total_workspace_size"]
        by_step = ["workspace_limit"] * (values["workspace_limit"] is PEAK)
        by_step += ["memory_limit"] * (values["memory_limit"] is not None)
        if by_step and total is not None:
            raise SettingError(
                f"{by_step[0]}={format_bytes(values[by_step[0]])} and total_workspace_size={format_bytes(total)}: "
                "accepted is one of them"
            )
        if values["count_stock"]:
            _check_counted(values, by_step)
            values["planning"] = "ahead"
        if by_step == ["memory_limit"] and alone:
            values["workspace_limit"] = math.inf
        if total is not None:
            values["workspace_limit"] = total if alone else min(total, values["workspace_limit"])
        return cls(**values, sources=sources)


def _check_counted(values: Mapping[str, Any], by_step: Sequence[str]) -> None:
    """Refuses limits that the scratch memory of torch's own kernels cannot count within."""
    found = {name: values[name] for name in (*by_step, "total_workspace_size") if values[name] is not None}
    given = [f"{name}={format_bytes(value)}" for name, value in found.items()]
    for each in [*given, *(["planning=live"] if values["planning"] == "live" else [])]:
        raise SettingError(
            f"count_stock=on and {each}: accepted beside it are a workspace_limit in bytes and planning ahead"
        )
