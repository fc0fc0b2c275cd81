"""Names of a package that are imported when they are first asked for.

torch takes seconds to import. What needs none of it, such as a command's help or a launcher, does not wait for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attributes(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names are defined in modules of it: {module: its names}."""
    places = {name: module for module, own in names.items() for name in own}

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
