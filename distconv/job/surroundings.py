"""What a script finds around itself on every rank: the random state and the process that one process would have."""

from __future__ import annotations

import contextlib
import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distconv.job.one_process import one_process
from distconv.job.random_state import KEY_BYTES, State, common_entropy, set_generators, state_of_generators


@dataclass(frozen=True)
class _Start:
    """What the first rank gives to all before the script starts."""

    generators: State
    entropy: bytes


@contextlib.contextmanager
def surroundings(store: Store, *, show_ranks: bool = False) -> Iterator[None]:
    """Within it a script runs on every rank with the first rank's random state, and is told of one process.

    Every rank of the job must call it, once. With `show_ranks` the script is told of all ranks.
    """
    start = _first_ranks(store)
    set_generators(start.generators, every_device=True)
    with contextlib.ExitStack() as around:
        around.enter_context(common_entropy(start.entropy))
        if not show_ranks:
            around.enter_context(one_process())
        yield


def _first_ranks(store: Store) -> _Start:
    name = "distconv/start"
    if dist.get_rank() == 0:
        packed = pickle.dumps(_Start(state_of_generators(), secrets.token_bytes(KEY_BYTES)))
        store.set(name, packed)  # type: ignore[arg-type]  # bytes serve too
    start: _Start = pickle.loads(store.get(name))
    return start
