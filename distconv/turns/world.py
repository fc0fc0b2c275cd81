"""Gives the thread of each part its own state of torch.distributed, in which it is a rank of its own job."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distconv.tensors import group_of_one, hooks
from distconv.tensors.group_of_one import NAMES, GroupOfOne, answer, is_inside
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
    """A part as a rank of torch.distributed: its number among ``parts`` of all ranks, its collectives, and its groups.

    ``here``: the number of the first part of this process, and how many parts it has.
    """

    def __init__(self, number: int, parts: int, pending: PendingCollectives, here: tuple[int, int]) -> None:
        self.number, self.parts, self.pending = number, parts, pending
        self._first, self._own = here
        self.groups: list[TurnGroup] = []
        self.key = next(_keys)
        self.world: Any = None
        self._made: dict[tuple[int, ...], int] = {}

    def names(self) -> Iterable[tuple[Any, str]]:
        """The groups that this part has in torch.distributed, and their names."""
        return () if self.world is None else list(self.world.pg_names.items())

    def group(self, rank: int, ranks: tuple[int, ...], name: str) -> TurnGroup:
        """A new group. Its key is its members, and how many groups of these members were made before."""
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


@until_put_back
def _answer_programs() -> None:
    for name in ("is_initialized", *NAMES):
        if hasattr(dist, name):
            replace(dist, name, _of_process(getattr(dist, name)))


def _of_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that answers a program within a part as outside: there is one process, which may
    have initialized a group of itself."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if thread.part is None or is_inside(sys._getframe(1)):
            return function(*args, **kwargs)
        of_part, thread.world = thread.world, None
        try:
            if not dist.is_initialized() or function.__name__ == "is_initialized":
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return answer(function.__name__, GroupOfOne(dist.get_backend()), given.arguments)
        finally:
            thread.world = of_part

    return call


def _named(stock: Any) -> Any:
    """Makes the names of groups unique: torch counts those of each part from 0, and registers them for the process."""

    @functools.wraps(stock)
    def name(*args: Any, **kwargs: Any) -> str:
        part = thread.part
        return stock(*args, **kwargs) if part is None else f"part {part.key} {stock(*args, **kwargs)}"

    return name


def register_groups(members: Iterable[PartWorld]) -> None:
    """Registers the groups of parts with torch again, where a program has destroyed all groups."""
    _open()
    if not group_of_one.answers_scripts:
        _answer_programs()
    for member in members:
        for group, name in member.names():
            try:
                _registry._resolve_process_group(name)
            except RuntimeError:
                _registry._register_process_group(name, group)


def enter_part(part: PartWorld) -> None:
    """Makes this thread a part, which to torch.distributed is a rank."""
    kind = type(distributed_c10d._world.of_process)  # type: ignore[attr-defined]
    thread.part = part
    thread.world = part.world = type("PartWorld", (kind,), {**{name: {} for name in _KEPT}, "group_count": 0})()
    hook = sys.excepthook
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=part.number, world_size=part.parts)
    sys.excepthook = hook  # torch's would write a rank before what ends the program


def refuse_outside(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """UnsupportedOperation where an operator of a thread that is no part reads a DTensor of a part."""
    if thread.part is None and any(getattr(mesh, "_thread_id", None) in meshes for *_, mesh in operands_of(args)):
        raise refuse(
            func,
            "a tensor that a part of a call in turn has kept is used outside of the call; accepted: tensors that"
            " modules, their hooks, and the objects, lists and variables of these have kept",
            whole_helps=False,
        )


meshes: set[Any] = set()  # The numbers of the meshes of parts.
