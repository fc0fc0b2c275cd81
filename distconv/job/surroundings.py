"""What a script finds around itself on every rank: random state, files and answers as one process has them."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.job.files.private import FOLDER_VARIABLE, files_of_rank, make_folder
from distconv.job.one_process import one_process
from distconv.job.random_state import KEY_BYTES, State, common_entropy, set_generators, state_of_generators


@dataclass(frozen=True)
class _Start:
    """What the first rank gives to all before the script starts."""

    generators: State
    entropy: bytes
    files: str  # the job's folder


@contextlib.contextmanager
def surroundings(store: Store, *, show_ranks: bool = False) -> Iterator[None]:
    """Within it a script runs on every rank with the first rank's random state, is told of one process, and leaves
    the files that one process leaves.

    Every rank of the job must call it, once. With `show_ranks` the script is told of all ranks.
    """
    start = _first_ranks(store, os.environ.pop(FOLDER_VARIABLE, None))
    set_generators(start.generators, every_device=True)
    with contextlib.ExitStack() as around:
        around.enter_context(common_entropy(start.entropy))
        around.enter_context(files_of_rank(start.files, dist.get_rank()))
        _wait_for_all(store)  # from here on the first rank's changes are noted, and every rank can tell
        if not show_ranks:
            around.enter_context(one_process())
        yield


def _first_ranks(store: Store, folder: str | None) -> _Start:
    name = "distconv/start"
    if dist.get_rank() == 0:
        start = _Start(state_of_generators(), secrets.token_bytes(KEY_BYTES), folder or make_folder())
        store.set(name, pickle.dumps(start))  # type: ignore[arg-type]  # bytes serve too
    agreed: _Start = pickle.loads(store.get(name))
    return agreed


def _wait_for_all(store: Store) -> None:
    if store.add("distconv/ready", 1) == dist.get_world_size():
        store.set("distconv/all ready", "yes")
    store.get("distconv/all ready")
