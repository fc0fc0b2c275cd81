"""Lazy imports: the names of a package are imported when they are first used.

Importing torch takes seconds. Whatever does without it, such as the help of a command or a launcher, does not wait.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which nothing is collected as garbage, for imports of large packages, and calls that are followed.

    What they make stays alive, and collections that find nothing take a quarter of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def attributes(package: str, names: Mapping[str, Iterable[str]], check: Callable[[], object]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names are defined in modules of it: {module: its names}.

    ``check``: asks torch for what these modules need, before the first of them is imported; or at once, where the
    program has imported torch already.
    """
    if "torch" in sys.modules:
        check()
    places = {name: module for module, own in names.items() for name in own}

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            check()
            value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
