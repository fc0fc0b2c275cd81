"""Caches of the program's functions (`functools.lru_cache`), which must not keep what a followed call has made."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

from distconv.turns.reach import FOREIGN

_CACHED: Any = type(functools.lru_cache(len))


@contextlib.contextmanager
def caches_emptied() -> Iterator[None]:
    """A context in which tensors have no numbers: functions that have remembered a result in it forget all results."""
    functions = [each for each in gc.get_objects() if type(each) is _CACHED]
    programs = [each for each in functions if (each.__module__ or "").partition(".")[0] not in FOREIGN]
    misses = [(each, each.cache_info().misses) for each in programs]
    try:
        yield
    finally:
        for each, before in misses:
            if each.cache_info().misses > before:
                each.cache_clear()
