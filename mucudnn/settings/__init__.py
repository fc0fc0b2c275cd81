"""Settings: what a user may choose, through the environment or through `patch`; all checks are here."""

from mucudnn.settings.setting import (
    MEMORY,
    SETTINGS,
    VARIABLES,
    Setting,
    SettingError,
    cache_folder,
    one_of,
    parse_switch,
)
from mucudnn.settings.settings import Given, Settings

__all__ = [
    "MEMORY",
    "SETTINGS",
    "VARIABLES",
    "Given",
    "Setting",
    "SettingError",
    "Settings",
    "cache_folder",
    "one_of",
    "parse_switch",
]
