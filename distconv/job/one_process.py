"""Makes a script on many ranks see one process: torch.distributed answers it with groups and meshes of one process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, fsdp
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors import group_of_one
from distconv.tensors.group_of_one import NAMES, GroupOfOne, answer, data_parallel_of_one, is_inside, requested
from distconv.tensors.process_groups import new_group
from distconv.tensors.refusal import UnsupportedOperation
from mucudnn.process import substituted, warn

_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_GTIDS"),
    *("SLURM_DISTRIBUTION", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "PALS_RANKID"),
    *("PALS_LOCAL_RANKID", "ALPS_APP_PE"),
)
_PREFIXES = (
    *("ROLE_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_COMM_WORLD_", "HYDI_", "HYDRA_"),
    *("SLURM_NTASKS", "SLURM_TASK", "SLURM_STEP_", "SLURM_SRUN_", "FLUX_TASK_"),
)


def is_hidden(variable: str) -> bool:
    """Whether an environment variable is about ranks."""
    return variable in _VARIABLES or variable.startswith(_PREFIXES)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A context in which all code but torch.distributed and this package sees one process.

    Launchers' variables are not in the environment, torch.distributed is not initialized until a script initializes a
    group of one process, and mpi4py's COMM_WORLD is this rank alone. UnsupportedOperation where a script starts a group
    of more processes.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    script = _Script()
    with (
        _hidden(os.environ),
        substituted(dist, **script.answers()),
        data_parallel_of_one(script.default_group),
        meshes_of_one(lambda: is_inside(sys._getframe(2))),
        substituted(mpi, COMM_WORLD=mpi.COMM_SELF) if mpi is not None else contextlib.nullcontext(),
        substituted(group_of_one, answers_scripts=True),
    ):
        yield


@contextlib.contextmanager
def _hidden(environment: Any) -> Iterator[None]:
    taken = {name: environment.pop(name) for name in list(environment) if is_hidden(name)}
    try:
        yield
    finally:
        environment.update(taken)


class _Script:
    """The answers of torch.distributed to the script: nothing is initialized, or its own group of one process."""

    def __init__(self) -> None:
        self._group: GroupOfOne | None = None

    def default_group(self) -> GroupOfOne:
        """The script's group; torch's error where there is none."""
        if self._group is None:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        return self._group

    def answers(self) -> dict[str, Any]:
        """The substitutes for torch.distributed's own functions by name, for calls from outside."""
        script = self
        stock = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}
        is_initialized, init, destroy, group = (
            *(dist.is_initialized, dist.init_process_group, dist.destroy_process_group),
            dist.group,
        )

        class World(type(group)):  # type: ignore[misc]
            WORLD = property(lambda _: group.WORLD if is_inside(sys._getframe(1)) else script._group)

        def is_initialized_here() -> bool:
            return is_initialized() if is_inside(sys._getframe(1)) else script._group is not None

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if is_inside(sys._getframe(1)):
                return init(*args, **kwargs)
            if script._group is not None:
                raise ValueError("trying to initialize the default process group twice!")
            script._group = requested(**inspect.signature(init).bind(*args, **kwargs).arguments)

        def destroy_process_group(group: Any = None) -> None:
            if is_inside(sys._getframe(1)) or not (group is None or isinstance(group, GroupOfOne)):
                return destroy(group)
            if group in (None, script.default_group()):
                script._group = None

        return {
            **{name: self._answering(function) for name, function in stock.items()},
            "is_initialized": is_initialized_here,
            "init_process_group": init_process_group,
            "destroy_process_group": destroy_process_group,
            "group": World("group", (group,), {}),
        }

    def _answering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with the results of one process, for calls of the script with no group or one of one process."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_inside(sys._getframe(1)):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            group: Any = given.arguments.get("group", given.arguments.get("parent_pg"))
            if group is None:
                group = self.default_group()
            elif not isinstance(group, GroupOfOne):
                return function(*args, **kwargs)
            given.apply_defaults()
            return answer(function.__name__, group, given.arguments)

        return call


_ALONE = "{}: the script shards the model itself, in its world of one process, so each rank computes all of it"


@functools.cache
def own_group() -> dist.ProcessGroup:
    """The group of this rank alone. Each rank makes its own, and waits for no other."""
    group: Any = new_group([dist.get_rank()], by_members=True)
    return group


def mesh_of_one(device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: Any = None, **_: Any) -> DeviceMesh:
    """The mesh that `init_device_mesh` gives in one process. RuntimeError, as torch raises there, for more devices."""
    if math.prod(mesh_shape) != 1:
        raise RuntimeError(
            f"Mesh should not be bigger than default world size 1, but found {math.prod(mesh_shape)} ranks!"
        )
    groups, ranks = own_group(), [dist.get_rank()]
    if len(mesh_shape) == 1:
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh_dim_names)
    for _axis in mesh_shape[1:]:
        ranks = [ranks]  # type: ignore[list-item]
    return DeviceMesh.from_group([groups] * len(mesh_shape), device_type, ranks, mesh_dim_names=mesh_dim_names)


@contextlib.contextmanager
def meshes_of_one(is_inside: Callable[[], bool]) -> Iterator[None]:
    """A context in which meshes, and models of FSDP on no mesh or group of their own, are of one process.

    ``is_inside``: whether the function that calls the caller distributes the script, and sees the ranks.
    """
    make, shard, init = device_mesh.init_device_mesh, fsdp.fully_shard, fsdp.FullyShardedDataParallel.__init__
    begin = DeviceMesh.__init__

    @functools.wraps(begin)
    def begun(*args: Any, **kwargs: Any) -> None:
        if not is_inside():
            raise UnsupportedOperation(
                "DeviceMesh(...) in a script that distconv distributes; accepted: init_device_mesh of one process, or"
                " --show-ranks for a script that works with the ranks itself"
            )
        begin(*args, **kwargs)

    @functools.wraps(make)
    def init_device_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        return make(*args, **kwargs) if is_inside() else mesh_of_one(*args, **kwargs)

    @functools.wraps(shard)
    def fully_shard(module: Any, **options: Any) -> Any:
        warn(_ALONE.format("fully_shard"), "distconv")
        if options.get("mesh") is None:
            modules = module if isinstance(module, list | tuple) else [module]
            first = next((x for each in modules for x in each.parameters()), None)
            options["mesh"] = mesh_of_one("cpu" if first is None else first.device.type, (1,))
        return shard(module, **options)

    @functools.wraps(init)
    def fully_sharded(self: Any, module: Any, process_group: Any = None, *args: Any, **options: Any) -> None:
        warn(_ALONE.format("FullyShardedDataParallel"), "distconv")
        if options.get("device_mesh") is None and not isinstance(process_group, dist.ProcessGroup | tuple):
            process_group = own_group()
        init(self, module, process_group, *args, **options)

    with (
        substituted(device_mesh, init_device_mesh=init_device_mesh),
        substituted(dist, init_device_mesh=init_device_mesh),
        substituted(DeviceMesh, __init__=begun),
        substituted(fsdp, fully_shard=fully_shard),
        substituted(fsdp.FullyShardedDataParallel, __init__=fully_sharded),
    ):
        yield
