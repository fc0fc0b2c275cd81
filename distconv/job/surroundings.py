"""Gives a script on every rank the surroundings of one process: its random state, files and answers."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.files.private import FOLDER_VARIABLE, files_of_rank, make_folder
from distconv.job.one_process import one_process
from distconv.job.random_state import (
    KEY_BYTES,
    State,
    as_text,
    common_entropy,
    from_text,
    set_generators,
    state_of_generators,
)
from distconv.job.unwritten_memory import zeros_for_unwritten


@contextlib.contextmanager
def surroundings(store: Store, *, show_ranks: bool = False) -> Iterator[None]:
    """A context in which a script runs on every rank with the first rank's random state, sees one process, and leaves
    the files that one process leaves.

    Every rank of the job must call it, once. With `show_ranks` the script sees all ranks.
    """
    generators, entropy, folder = _first_ranks(store, os.environ.pop(FOLDER_VARIABLE, None))
    set_generators(generators, every_device=True)
    with contextlib.ExitStack() as around:
        around.enter_context(common_entropy(entropy))
        around.enter_context(zeros_for_unwritten())
        around.enter_context(files_of_rank(folder, dist.get_rank()))
        _wait_for_all(store)  # from here on the first rank's changes are noted, and every rank can tell
        if not show_ranks:
            around.enter_context(one_process())
        yield


def _first_ranks(store: Store, folder: str | None) -> tuple[State, bytes, str]:
    """What the first rank gives to all before the script starts: random state, entropy, and the job's folder.

    It goes as text: whoever can reach the store could write to it, and reading a pickle runs what it says.
    """
    names = [f"distconv/start/{what}" for what in ("generators", "entropy", "folder")]
    if dist.get_rank() == 0:
        given = as_text(state_of_generators()), secrets.token_bytes(KEY_BYTES), (folder or make_folder()).encode()
        for name, value in zip(names, given, strict=True):
            store.set(name, value)  # type: ignore[arg-type]  # bytes serve too
    generators, entropy, shared = (bytes(store.get(name)) for name in names)
    return from_text(generators), entropy, shared.decode()


def _wait_for_all(store: Store) -> None:
    if store.add("distconv/ready", 1) == dist.get_world_size():
        store.set("distconv/all ready", "yes")
    store.get("distconv/all ready")
