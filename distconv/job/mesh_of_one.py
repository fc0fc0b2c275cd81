"""Meshes and sharded models for a script that sees one process: each rank gets a real group of its own."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, fsdp
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.process_groups import new_group
from distconv.tensors.refusal import UnsupportedOperation
from mucudnn.process.substitution import substituted
from mucudnn.process.warning import warn

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

    ``is_inside``: whether what calls the caller distributes the script, and sees things as they are.
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
