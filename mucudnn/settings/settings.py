"""Settings: the values of all settings, from arguments, the environment and the defaults, as they go together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict

from mucudnn.settings.setting import SETTINGS, SettingError
from mucudnn.sizes import PEAK, format_bytes


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
        return _is_by_step("workspace_limit", self.workspace_limit) or self.memory_limit is not None

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
        by_step = [name for name in ("workspace_limit", "memory_limit") if _is_by_step(name, values[name])]
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
    others = [name for name in ("total_workspace_size",) if values[name] is not None]
    for name in (*by_step, *others, *(["planning"] if values["planning"] == "live" else [])):
        value = values[name] if name == "planning" else format_bytes(values[name])
        raise SettingError(
            f"count_stock=on and {name}={value}: accepted beside it are a workspace_limit in bytes and planning ahead"
        )


def _is_by_step(name: str, value: object) -> bool:
    return value is PEAK if name == "workspace_limit" else value is not None
