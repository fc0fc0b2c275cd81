"""Settings: what a user may choose, through the environment or through `patch`; all checks are here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict

from mucudnn.optimizer import POLICIES
from mucudnn.sizes import PEAK, format_bytes, parse_bytes, parse_limit

MEMORY = ":memory:"
"""The database path that means no file."""

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


def _one_of(*words: str) -> Callable[[object], str]:
    """Parses one of some words, in capitals or not."""

    def parse(value: object) -> str:
        for word in words:
            if isinstance(value, str) and value.strip().lower() == word.lower():
                return word
        raise ValueError

    return parse


def _parse_devices(value: object) -> tuple[int, ...]:
    """Numbers of GPUs; none of them means all."""
    if isinstance(value, str):
        value = [] if value.strip().lower() == "all" else value.split(",")
    elif not isinstance(value, Sequence) or not all(isinstance(number, int) for number in value) or not value:
        raise ValueError
    numbers = tuple(int(number) for number in value)
    if min(numbers, default=0) < 0:
        raise ValueError
    return numbers


def _parse_progress(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    word = value.strip().lower() if isinstance(value, str) else ""
    if word == "auto":
        return word
    if word in _ON or word in _OFF:
        return "on" if word in _ON else "off"
    raise ValueError


def _default_database() -> str:
    return str(cache_folder() / "times.sqlite")


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
    """One setting: where it comes from and what it accepts.

    Attributes:
        variable: its environment variable.
        default: makes the text it has if nobody gives a value; `None` for nothing.
        accepted: the values it takes, for people.
        meaning: what it does, for people.
        parse: the value from what was given; raises ValueError.
    """

    variable: str
    default: Callable[[], str | None]
    accepted: str
    meaning: str
    parse: Callable[[object], Any]

    def value(self, name: str, given: object) -> Any:
        """The value from what was given under `name`, an argument's or a variable's.

        Raises:
            SettingError: naming `name`, what was given and what is accepted.
        """
        try:
            return self.parse(given)
        except (ValueError, OverflowError):
            raise SettingError(f"{name}={given!r}: accepted is {self.accepted}") from None


SETTINGS = {
    "workspace_limit": Setting(
        "MUCUDNN_WORKSPACE_LIMIT",
        lambda: "64MiB",
        "a number of bytes, alone or with a unit (67108864, 64MiB, 1GB), unlimited, or peak",
        "scratch memory that one convolution may use; peak: what does not raise a step's peak; 0: nothing is divided",
        parse_limit,
    ),
    "memory_limit": Setting(
        "MUCUDNN_MEMORY_LIMIT",
        lambda: None,
        "a number of bytes, alone or with a unit (10737418240, 10GiB), or unlimited",
        "memory that the program may fill: each convolution may use what is free at its moment of a step",
        parse_bytes,
    ),
    "total_workspace_size": Setting(
        "MUCUDNN_TOTAL_WORKSPACE_SIZE",
        lambda: None,
        "a number of bytes, alone or with a unit (536870912, 512MiB, 2GB), or unlimited",
        "scratch memory that all convolutions together may use, each layer its own; unset, they reuse the same",
        parse_bytes,
    ),
    "policy": Setting(
        "MUCUDNN_BATCH_SIZE_POLICY",
        lambda: "powerOfTwo",
        f"one of {', '.join(POLICIES)}",
        "the micro-batch sizes that are tried",
        _one_of(*POLICIES),
    ),
    "planning": Setting(
        "MUCUDNN_PLANNING",
        lambda: "auto",
        "auto, ahead or live",
        "when algorithms are measured: before a convolution's first call, or on its calls; auto: live on a processor",
        _one_of("auto", "ahead", "live"),
    ),
    "database": Setting(
        "MUCUDNN_DATABASE",
        _default_database,
        f"the path of a file (not of a directory) or {MEMORY}",
        "where measured times are kept",
        _parse_database,
    ),
    "engines": Setting(
        "MUCUDNN_ENGINES",
        lambda: "heuristic",
        "heuristic or all",
        "the engines of cuDNN that are tried: the best that its heuristics propose, or all that serve",
        _one_of("heuristic", "all"),
    ),
    "benchmark_devices": Setting(
        "MUCUDNN_BENCHMARK_DEVICES",
        lambda: None,
        "all, or numbers of GPUs separated by commas (0,1,3)",
        "GPUs that share the measuring; only those of the kind of a call's own do. Unset, that one alone",
        _parse_devices,
    ),
    "check": Setting(
        "MUCUDNN_CHECK",
        lambda: "on",
        "on or off",
        "whether an algorithm's result is compared with torch's own, and both with float64, before it is used",
        lambda value: ("off", "on").index(_parse_progress(value)) == 1,
    ),
    "progress": Setting(
        "MUCUDNN_PROGRESS",
        lambda: "auto",
        "auto, on or off",
        "a progress bar while measuring; auto shows it on a terminal",
        _parse_progress,
    ),
    "log": Setting(
        "MUCUDNN_LOG",
        lambda: None,
        f"one of {', '.join(_LEVELS)}",
        "the least level of log lines that go to stderr; unset leaves logging to the program",
        _one_of(*_LEVELS),
    ),
}
"""Every setting by its name in `patch`."""

VARIABLES = tuple(setting.variable for setting in SETTINGS.values())
"""The environment variables that are read."""


class Given(TypedDict, total=False):
    """What a program may give for the settings, by their names; `mucudnn.patch` says what they mean."""

    workspace_limit: str | float | None
    memory_limit: str | float | None
    total_workspace_size: str | float | None
    policy: str | None
    planning: str | None
    database: str | os.PathLike[str] | None
    engines: str | None
    benchmark_devices: str | Sequence[int] | None
    check: str | bool | None
    progress: str | bool | None
    log: str | None


@dataclass(frozen=True)
class Settings:
    """The settings of one `patch`.

    Attributes:
        workspace_limit: bytes that one convolution may use beyond its operands and result; `math.inf` for no limit.
            Where only a total is given, that is the limit. `PEAK`: what does not raise the peak memory of a step.
        memory_limit: bytes that all of the program's memory may come to; `None` where nobody asked for it.
        total_workspace_size: bytes that the workspaces of all convolutions may add up to; `None` where they reuse one.
        policy: the micro-batch sizes that are tried, a name of `optimizer.POLICIES`.
        planning: "ahead", measured before a convolution's first call, "live", on the calls themselves, or "auto".
        database: path of the database of times, or `:memory:`.
        engines: of cuDNN that are tried: "heuristic", those that it proposes, or "all".
        benchmark_devices: GPUs that share the measuring, all if empty; `None` for a call's own alone.
        check: whether the results of algorithms are checked before these are used.
        progress: "auto" (a bar on a terminal), "on" or "off".
        log: the least level of log lines that go to stderr; `None` leaves logging as the program has it.
        sources: for every setting, what gave its value: "argument", the environment variable's name, or "default".
    """

    workspace_limit: float
    memory_limit: float | None
    total_workspace_size: float | None
    policy: str
    planning: str
    database: str
    engines: str
    benchmark_devices: tuple[int, ...] | None
    check: bool
    progress: str
    log: str | None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_by_step(self) -> bool:
        """Whether budgets come from the memory that a step leaves."""
        return _is_by_step("workspace_limit", self.workspace_limit) or self.memory_limit is not None

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
            elif environ.get(setting.variable):
                values[name] = setting.value(setting.variable, environ[setting.variable])
                sources[name] = setting.variable
            else:
                default = setting.default()
                values[name] = None if default is None else setting.value(setting.variable, default)
                sources[name] = "default"
        alone = sources["workspace_limit"] == "default"
        total = values["total_workspace_size"]
        by_step = [name for name in ("workspace_limit", "memory_limit") if _is_by_step(name, values[name])]
        if by_step and total is not None:
            raise SettingError(
                f"{by_step[0]}={format_bytes(values[by_step[0]])} and total_workspace_size={format_bytes(total)}: "
                "accepted is one of them"
            )
        if by_step == ["memory_limit"] and alone:
            values["workspace_limit"] = math.inf
        if total is not None:
            values["workspace_limit"] = total if alone else min(total, values["workspace_limit"])
        return cls(**values, sources=sources)


def _is_by_step(name: str, value: object) -> bool:
    return value is PEAK if name == "workspace_limit" else value is not None
