"""Gives a script on every rank the surroundings of one process: its random state, files and answers."""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from distconv import settings
from distconv.files.job_folder import FOLDER_VARIABLE, key_of, make_folder
from distconv.files.private import files_of_rank
from distconv.job.attempt import prefix, without_prefix
from distconv.job.one_process import one_process
from distconv.job.random_state import State, as_text, common_entropy, from_text, set_generators, state_of_generators
from distconv.job.started_processes import starts_reported
from distconv.job.unwritten_memory import zeros_for_unwritten
from distconv.place.addresses import is_on_one_machine


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
        _wait_for_all(store)  # from here on the first rank's changes are noted, and every rank can read them
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            around.enter_context(starts_reported())
        if not show_ranks:
            around.enter_context(one_process())
        yield


def _first_ranks(store: Store, given: str | None) -> tuple[State, bytes, str]:
    """The first rank's random state, entropy and job folder, on every rank before the script starts.

    It goes as text: whoever can reach the store could write to it, and reading a pickle runs what it says. `given`: the
    folder, where the launcher made it. Else its name comes from the store, and each rank that sees it looks whether it
    is this job's. Ranks of one machine read the entropy's key from it; others have what the store says, and what only
    those know who have the job's secret.
    """
    names = [f"distconv/start/{what}" for what in ("generators", "folder", "entropy", "check")]
    job = "" if given is not None else _name(store)
    together = given is not None or is_on_one_machine()
    secret = settings.value("secret") or b""
    if dist.get_rank() == 0:
        folder = given or make_folder(job)
        own = key_of(folder, job)
        values = (
            as_text(state_of_generators()),
            folder.encode(),
            b"in the folder" if together else own,
            _check(_key(secret, own)),
        )
        for name, value in zip(names, values, strict=True):
            store.set(name, value)  # type: ignore[arg-type]  # bytes serve too
    generators, named, sent, check = (bytes(store.get(name)) for name in names)
    folder = given or named.decode()
    key = _key(secret, key_of(folder, job) if together or os.path.lexists(folder) else sent)
    if not hmac.compare_digest(_check(key), check):
        raise RuntimeError(
            "this rank has another key for its random numbers than the first rank; accepted: on all machines of a job"
            " the same file of DISTCONV_SECRET, or none, and a store to which nobody else writes"
        )
    return from_text(generators), key, folder


def _name(store: Store) -> str:
    """A name that no other job of the machine has: the address of its store."""
    found = without_prefix(store)
    where = f"{found.host} {found.port}" if isinstance(found, TCPStore) else ""
    return f"{where} {prefix('files')}"


def _key(secret: bytes, found: bytes) -> bytes:
    return hmac.digest(secret, found, "sha256")


def _check(key: bytes) -> bytes:
    """A hash that shows whether ranks have the same key, without the key."""
    return hmac.digest(key, b"check", "sha256").hex().encode()


def _wait_for_all(store: Store) -> None:
    if store.add("distconv/ready", 1) == dist.get_world_size():
        store.set("distconv/all ready", "yes")
    store.get("distconv/all ready")
