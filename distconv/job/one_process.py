"""Tells a script that there is one process when it asks how many there are."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import distributed as data_parallel

from distconv.tensors.refusal import UnsupportedOperation
from mucudnn.substitution import substituted

_INSIDE = ("torch.distributed", "torch._", "distconv", "mucudnn")
"""Modules whose questions are answered as things are: those that distribute the script."""

_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_GTIDS"),
    *("SLURM_DISTRIBUTION", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "PALS_RANKID"),
    *("PALS_LOCAL_RANKID", "ALPS_APP_PE"),
)
_PREFIXES = (
    *("ROLE_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_COMM_WORLD_", "HYDI_", "HYDRA_"),
    *("SLURM_NTASKS", "SLURM_TASK", "SLURM_STEP_", "SLURM_SRUN_", "FLUX_TASK_"),
)

_NEED_A_GROUP = (
    *("get_rank", "get_world_size", "get_backend", "barrier", "monitored_barrier", "new_group", "split_group"),
    *("destroy_process_group", "broadcast", "broadcast_object_list", "all_reduce", "reduce", "send", "recv"),
    *("isend", "irecv", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_single", "reduce_scatter_single"),  # names since torch 2.13
)
"""Functions of torch.distributed that fail in one process without a process group."""


def is_hidden(variable: str) -> bool:
    """Whether an environment variable tells of ranks."""
    return variable in _NAMES or variable.startswith(_PREFIXES)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A context in which everything outside torch's own distribution and this package sees one process.

    Launchers' variables are not in the environment, torch.distributed says that it is not initialized, and
    mpi4py's COMM_WORLD is this rank alone. UnsupportedOperation where a script starts a process group of its own.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with (
        _hidden(os.environ),
        substituted(dist, **_answers()),
        substituted(data_parallel, _get_default_group=_no_group),
        substituted(mpi, COMM_WORLD=mpi.COMM_SELF) if mpi is not None else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _hidden(environment: Any) -> Iterator[None]:
    taken = {name: environment.pop(name) for name in list(environment) if is_hidden(name)}
    try:
        yield
    finally:
        environment.update(taken)


def _is_inside(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_INSIDE)


def _no_group(*_: object, **__: object) -> Any:
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def _answers() -> dict[str, Callable[..., Any]]:
    is_initialized, init_process_group = dist.is_initialized, dist.init_process_group

    def asked() -> bool:
        return is_initialized() and _is_inside(sys._getframe(1))

    def init(*args: Any, **kwargs: Any) -> None:
        if not _is_inside(sys._getframe(1)):
            raise UnsupportedOperation(
                "torch.distributed.init_process_group in a script that distconv distributes; accepted: the script "
                "without it, or --show-ranks for a script that works with the ranks itself"
            )
        init_process_group(*args, **kwargs)

    answers: dict[str, Callable[..., Any]] = {"is_initialized": asked, "init_process_group": init}
    for name in _NEED_A_GROUP:
        if hasattr(dist, name):
            answers[name] = _without_group(getattr(dist, name))
    return answers


def _without_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one process has it, for calls from outside that name no group."""
    names = list(inspect.signature(function).parameters)
    position = names.index("group") if "group" in names else len(names)

    def call(*args: Any, **kwargs: Any) -> Any:
        group = args[position] if len(args) > position else kwargs.get("group")
        if group is None and not _is_inside(sys._getframe(1)):
            _no_group()
        return function(*args, **kwargs)

    return call
