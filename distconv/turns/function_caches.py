"""Functions of the program that remember results (`functools.lru_cache`), and forget those without numbers."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from distconv.turns.value_kinds import FOREIGN

_CACHED: Any = type(functools.lru_cache(len))


def remembering_functions() -> list[Any]:
    """The program's functions that remember results. To find them takes some 50 ms."""
    functions = [each for each in gc.get_referrers(_CACHED) if type(each) is _CACHED]  # faster than all objects
    return [each for each in functions if (each.__module__ or "").partition(".")[0] not in FOREIGN]


@contextlib.contextmanager
def caches_emptied(functions: Sequence[Any]) -> Iterator[None]:
    """A context in which tensors have no numbers: functions that have remembered a result in it forget all results."""
    misses = [(each, each.cache_info().misses) for each in functions]
    try:
        yield
    finally:
        for each, before in misses:
            if each.cache_info().misses > before:
                each.cache_clear()
