"""The keys of a job in its ranks' store: each attempt of torchrun to run the job has its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def prefix(what: str) -> str:
    """The beginning of keys. torchrun may keep its store when it starts the ranks anew."""
    return f"distconv/{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def without_prefix(store: Store) -> Store:
    """The store itself: torch may put a prefix around a rank's store, but not around a watcher's."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
