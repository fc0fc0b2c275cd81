"""A process group of one process, for programs that have one: its collectives return their inputs."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed as data_parallel
from torch.utils._pytree import tree_map_only

from distconv.tensors.refusal import UnsupportedOperation
from mucudnn.process import substituted

_NOTHING_MOVES = ("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "all_reduce", "reduce")
_FIRST_TAKES_SECOND = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "scatter", "reduce_scatter"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
_NUMBERS = {"get_rank": 0, "get_world_size": 1, "get_global_rank": 0, "get_group_rank": 0}
_HAS_NO_PEER = ("send", "recv", "isend", "irecv")


_INSIDE = ("torch.distributed", "torch._", "distconv", "mucudnn")
"""Modules that see the ranks as they are: those that distribute the program."""

_OF_PROGRAMS = ("torch.distributed.nn", "torch.distributed.optim", "torch.distributed.algorithms")
"""Modules of torch.distributed that only programs use, and that call its functions for them."""


def is_inside(frame: FrameType) -> bool:
    """Whether the code of a frame is to see the ranks as they are."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_INSIDE) and not name.startswith(_OF_PROGRAMS)


answers_scripts = False  # Whether `distconv.job.one_process` answers the program for all of torch.distributed.


class GroupOfOne:
    """A process group whose only member is this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def size(self) -> int:
        """The number of its members."""
        return 1

    def rank(self) -> int:
        """The number of this process."""
        return 0


class Complete(dist.Work):
    """The handle of a collective that is complete when it begins."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    is_success = is_completed


def requested(backend: Any = None, init_method: str | None = None, **options: Any) -> GroupOfOne:
    """The group that a script asks for with the arguments of `init_process_group`.

    Raises:
        UnsupportedOperation: for a group of more than one process.
        ValueError: where the number of processes is given nowhere, as torch raises in a process without a launcher.
    """
    url = parse_qs(urlparse(init_method or "").query)
    found: dict[str, int] = {}
    for name, nothing in (("rank", -1), ("world_size", -1)):
        value = options.get(name, nothing)
        if value is None or value < 0:
            value = url.get(name, [os.environ.get(name.upper())])[0]
        if value is None:
            raise ValueError(
                f"Error initializing torch.distributed using env:// rendezvous: environment variable {name.upper()}"
                " expected, but not set"
            )
        found[name] = int(value)
    if found["world_size"] != 1 or found["rank"] != 0:
        raise UnsupportedOperation(
            f"torch.distributed.init_process_group of rank {found['rank']} of {found['world_size']} in a script that"
            " distconv distributes; accepted: one process, as without a launcher, or --show-ranks for a script that"
            " works with the ranks itself"
        )
    return GroupOfOne(str(backend or ("nccl" if torch.cuda.is_available() else "gloo")).lower())


def answer(name: str, group: GroupOfOne, given: dict[str, Any]) -> Any:
    """The result of a function of torch.distributed in this group, with its arguments by name."""
    values = list(given.values())
    if name in _HAS_NO_PEER:
        raise ValueError(f"torch.distributed.{name}: there is no other process in a group of one")
    if name in _NUMBERS:
        return _NUMBERS[name]
    if name in ("get_process_group_ranks", "get_backend"):
        return group.backend if name == "get_backend" else [0]
    if name in ("new_group", "split_group"):
        return GroupOfOne(str(given.get("backend") or group.backend).lower())
    with torch.no_grad():
        if name in _FIRST_TAKES_SECOND:
            target, source = (x[0] if isinstance(x, list | tuple) else x for x in values[:2])
            target.copy_(source if source.shape == target.shape else source.reshape(target.shape))
        elif name == "gather" and given["gather_list"]:
            given["gather_list"][0].copy_(given["tensor"])
        elif name == "all_gather_object":
            given["object_list"][0] = copy.deepcopy(given["obj"])
        elif name == "gather_object" and given["object_gather_list"]:
            given["object_gather_list"][0] = copy.deepcopy(given["obj"])
        elif name == "scatter_object_list":
            given["scatter_object_output_list"][0] = copy.deepcopy(given["scatter_object_input_list"][0])
    return Complete() if given.get("async_op") else None


NAMES = (
    *_NOTHING_MOVES,
    *_FIRST_TAKES_SECOND,
    *_HAS_NO_PEER,
    *_NUMBERS,
    *("get_process_group_ranks", "get_backend", "new_group", "split_group"),
    *("gather", "all_gather_object", "gather_object", "scatter_object_list"),
)
"""Functions of torch.distributed that fail in one process without a process group, and that `answer` knows."""


@contextlib.contextmanager
def data_parallel_of_one(default_group: Callable[[], Any]) -> Iterator[None]:
    """A context in which a model in DistributedDataParallel computes as the model alone.

    ``default_group``: gives the script's group, and raises what torch raises where there is none.
    """

    def init(self: Any, module: nn.Module, device_ids: Any = None, *_: Any, **options: Any) -> None:
        group = options.get("process_group") or default_group()
        nn.Module.__init__(self)
        self.module, self.device_ids, self.process_group = module, device_ids, group
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.require_backward_grad_sync = True

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(self.device_ids[0]), (args, kwargs))
        return self.module(*args, **kwargs)

    def nothing(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    with substituted(
        data_parallel.DistributedDataParallel,
        __init__=init,
        forward=forward,
        no_sync=nothing,
        join=nothing,
        register_comm_hook=nothing,
        _set_static_graph=nothing,
        train=nn.Module.train,
        __getstate__=lambda self: {name: x for name, x in vars(self).items() if name != "process_group"},
        __setstate__=nn.Module.__setstate__,
    ):
        yield
