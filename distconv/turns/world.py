"""Gives each thread of a part its own state of torch.distributed; other threads use that of the process."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distconv.tensors import hooks
from distconv.tensors.refusal import operands_of, refuse
from distconv.tensors.replacements import once_in_process, replace, until_put_back
from distconv.turns.group import BACKEND, PendingCollectives, TurnGroup

_registry: Any = torch._C._distributed_c10d


class _Thread(threading.local):
    world: Any = None
    part: PartWorld | None = None


thread = _Thread()

_keys = itertools.count(1)


class PartWorld:
    """A part in its thread: its number among ``parts`` of all ranks, its pending collectives, and its groups.

    ``here``: the first part of this rank, and how many it has.
    """

    def __init__(self, number: int, parts: int, pending: PendingCollectives, here: tuple[int, int]) -> None:
        self.number, self.parts, self.pending = number, parts, pending
        self._first, self._own = here
        self.groups: list[TurnGroup] = []
        self.key = next(_keys)
        self.world: Any = None
        self._made: dict[tuple[int, ...], int] = {}

    def names(self) -> Iterable[tuple[Any, str]]:
        """torch's groups of this part, and what they are registered by."""
        return () if self.world is None else list(self.world.pg_names.items())

    def group(self, rank: int, ranks: tuple[int, ...], name: str) -> TurnGroup:
        """A new group. Its members know it by who they are, and how many groups of the same they have made."""
        made = self._made[ranks] = self._made.get(ranks, 0) + 1
        here = range(self._first, self._first + self._own)
        far = {at: part // self._own for at, part in enumerate(ranks) if part not in here}
        part = self.number - self._first
        self.groups.append(TurnGroup(rank, len(ranks), name, self.pending, (ranks, made), part, far))
        return self.groups[-1]


def _create(options: Any, _: Any) -> TurnGroup:
    part = thread.part
    assert part is not None
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return part.group(options.group_rank, ranks, options.group_id)


class _Worlds:
    """Torch's records of its process groups: in the thread of a part that part's, elsewhere the process's."""

    def __init__(self, of_process: Any) -> None:
        object.__setattr__(self, "of_process", of_process)

    def __getattr__(self, name: str) -> Any:
        return getattr(thread.world or self.of_process, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(thread.world or self.of_process, name, value)


_KEPT = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
"""Records that torch's worlds share, and that are cleared when a program destroys its own groups."""


@once_in_process
def _register() -> None:
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    hooks.before_operators.append(refuse_outside)


@until_put_back
def _open() -> None:
    _register()
    replace(distributed_c10d, "_world", _Worlds(distributed_c10d._world))
    replace(distributed_c10d, "_process_group_name", _named(distributed_c10d._process_group_name))


def _named(stock: Any) -> Any:
    """torch counts the groups of each world by itself, and registers them by their names for the whole process."""

    @functools.wraps(stock)
    def name(*args: Any, **kwargs: Any) -> str:
        part = thread.part
        return stock(*args, **kwargs) if part is None else f"part {part.key} {stock(*args, **kwargs)}"

    return name


def know_groups(members: Iterable[PartWorld]) -> None:
    """torch finds the groups of parts by their names, also after a program has destroyed all of its own."""
    _open()
    for member in members:
        for group, name in member.names():
            try:
                _registry._resolve_process_group(name)
            except RuntimeError:
                _registry._register_process_group(name, group)


def enter_part(part: PartWorld) -> None:
    """This thread is a part from now on, and torch.distributed its ranks."""
    kind = type(distributed_c10d._world.of_process)  # type: ignore[attr-defined]
    thread.part = part
    thread.world = part.world = type("PartWorld", (kind,), {**{name: {} for name in _KEPT}, "group_count": 0})()
    hook = sys.excepthook
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=part.number, world_size=part.parts)
    sys.excepthook = hook  # torch's would write a rank before what ends the program


def refuse_outside(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """UnsupportedOperation where a thread that is no part is given a tensor of which a part has a piece."""
    if thread.part is None and any(getattr(mesh, "_thread_id", None) in meshes for *_, mesh in operands_of(args)):
        raise refuse(
            func,
            "a tensor that a part of a call in turn has kept is used outside of the call; accepted: tensors that"
            " modules, their hooks, and the objects, lists and variables of these have kept",
            whole_helps=False,
        )


meshes: set[Any] = set()  # The numbers of the meshes of parts.


def is_part() -> bool:
    """Whether this thread is a part."""
    return thread.part is not None
