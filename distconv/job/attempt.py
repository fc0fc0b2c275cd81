"""Prefixes for a job's keys in the ranks' key-value store: each attempt of torchrun to run the job has other keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def prefix(what: str) -> str:
    """The beginning of keys. torchrun may keep its store when it starts the ranks anew."""
    return f"distconv/{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def without_prefix(store: Store) -> Store:
    """The store beneath torch's prefixes, which the store of a rank may have, but that of its watcher has not."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
