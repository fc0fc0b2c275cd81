"""The public functions of distconv, but for `in_turn`: those defined here, and those imported under their own names.

Importing this module registers distconv's rules with torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv import settings
from distconv.model.checkpoint import whole_state as whole_state
from distconv.model.parallelize import distributed_script as distributed_script
from distconv.model.parallelize import parallelize as parallelize
from distconv.model.parallelize import shard as shard
from distconv.model.parameters import partition_of
from distconv.model.running import inside
from distconv.model.shard_gather import gather as gather
from distconv.place import find_place
from distconv.place.backends import agreed_backend
from distconv.private_names import SHUTDOWN, require
from distconv.reading.opening import open as open
from distconv.rules.registry import install_rules
from distconv.rules.values.numbers import described
from distconv.settings.channels import check_algorithm
from distconv.settings.partition import Partition
from distconv.tensors import hooks
from distconv.tensors.mesh import MeshToChoose, adopt, channel_algorithms, make_mesh, usable_mesh
from distconv.tensors.refusal import UnsupportedOperation as UnsupportedOperation
from distconv.tensors.replacements import put_back
from distconv.transfer.redistribution import redistribute as redistribute

install_rules()


def init(
    partition: str | DeviceMesh | MeshToChoose | None = None,
    *,
    ranks: Sequence[int] | None = None,
    device_type: str | None = None,
    channel_algorithm: str | None = None,
) -> DeviceMesh:
    """Makes the mesh of a partition, over all ranks or over some. Every rank of the job must call it.

    Uses the default process group where there is one. Else it starts one: over the backend of `DISTCONV_BACKEND`
    (default: nccl where every rank has a GPU of its own, else gloo), with the ranks that torchrun has started, or, over
    mpi, mpiexec; without these, with this process alone. It may be called again for another partition. On GPUs the
    current device becomes the one of the rank's local number: call `init` before tensors go to "cuda".

    Args:
        partition: mesh axes and the ranks along each, such as `"sample=2,height=2"`; or a mesh whose axes have these
            names. If not given, that of `distconv run`, else of `DISTCONV_PARTITION`. `"auto"` leaves it to the first
            `parallelize(model, mesh, strategy="auto", sample_input=...)`, before which the mesh cannot be used.
        ranks: the ranks of the job that make up the mesh, ascending; all of them if not given.
        device_type: "cpu" or "cuda"; if not given, "cuda" where there is a GPU.
        channel_algorithm: what stays where it is in layers whose channels are sharded: "x", "y", "w", or "auto", which
            moves least. If not given, that of `distconv run`, else of `DISTCONV_CHANNEL_ALGORITHM`, else "auto".

    Returns:
        The mesh, for `shard` and `parallelize`.

    Raises:
        ValueError: one line, for a partition or an algorithm that is not accepted or does not fit the ranks.
    """
    if isinstance(partition, DeviceMesh | MeshToChoose):
        mesh = adopt(usable_mesh(partition))
        _set_algorithm(mesh, partition_of(mesh), channel_algorithm)
        return mesh
    given = settings.value("partition") if partition is None else partition
    parsed = Partition.parse(given) if isinstance(given, str) and given != settings.AUTO else given
    if parsed is None:
        raise ValueError("no partition: pass one, such as 'sample=2,height=2', or set DISTCONV_PARTITION")
    _refuse_alone(parsed)
    settings.report_unknown_variables()
    device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.is_available():
        _take_gpu()
    if not dist.is_initialized():
        _init_process_group(device)
    if not isinstance(parsed, Partition):
        if ranks is not None:
            raise ValueError("partition 'auto' is for all ranks of the job: leave out ranks=, or name a partition")
        return cast(DeviceMesh, MeshToChoose(device, channel_algorithm))  # it becomes one
    mesh = make_mesh(parsed, ranks=ranks, device_type=device)
    _set_algorithm(mesh, parsed, channel_algorithm)
    return mesh


@contextlib.contextmanager
def patched(
    partition: str | DeviceMesh | MeshToChoose | None = None,
    *,
    ranks: Sequence[int] | None = None,
    device_type: str | None = None,
    channel_algorithm: str | None = None,
) -> Iterator[DeviceMesh]:
    """A context with the mesh that `init` makes of the same arguments, at whose end `shutdown` is called.

    Raises:
        ValueError: as `init`.
        RuntimeError: as `shutdown`, also at the beginning.
    """
    shutdown()
    install_rules()
    mesh = init(partition, ranks=ranks, device_type=device_type, channel_algorithm=channel_algorithm)
    try:
        yield mesh
    finally:
        shutdown()


def is_first() -> bool:
    """Whether this process is the job's first rank, or runs without a job.

    It says where to do what must be done once. A script that `distconv run` runs needs it only for side effects that
    are not kept to one rank anyway, for example a subprocess that writes a file. What is done on the first rank alone
    must not call the model.
    """
    return not dist.is_initialized() or dist.get_rank() == 0


def layout(x: Tensor) -> str:
    """The layout of a tensor as text: its shape and dtype, its sharded dims, and this rank's shape.

    ``print(x)`` shows the elements of the whole tensor instead, for which all ranks must call it; nothing is sent here.
    """
    return described(x) if isinstance(x, DTensor) else f"{tuple(x.shape)} {x.dtype} on this rank alone"


def _refuse_alone(partition: object) -> None:
    """ValueError where a program asks for the ranks of a job that it is not part of: each process would be a job."""
    if dist.is_initialized() or "RANK" in os.environ or settings.value("backend") == "mpi":
        return
    place = find_place(os.environ)
    ranks: int | str
    if isinstance(partition, Partition):
        ranks, needs = partition.ranks, f"{str(partition)!r} needs {partition.ranks} ranks"
    else:
        ranks, needs = (1, "") if place is None else (place.size or "RANKS", "'auto' is for all ranks of a job")
    if ranks != 1:
        started = "started alone;" if place is None else "started by MPI: set DISTCONV_BACKEND=mpi, or"
        raise ValueError(
            f"partition {needs}, and this process was {started} start the"
            f" program with: torchrun --nproc-per-node {ranks} {os.path.basename(sys.argv[0]) or 'PROGRAM'}"
        )


def _set_algorithm(mesh: DeviceMesh, partition: Partition, algorithm: str | None) -> None:
    channel_algorithms[mesh] = check_algorithm(algorithm or settings.value("channel_algorithm"), partition)


def _take_gpu() -> None:
    """Makes one GPU of the machine this process's current one, by its rank among the machine's ranks.

    Ranks beyond the number of GPUs share them. A GPU other than the first that the program has made current stays, as
    does one that the process group was bound to. It must happen before anything is sent: NCCL takes the current GPU,
    and torch's DeviceMesh chooses none once CUDA is in use.
    """
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return
    if dist.is_initialized():
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.type == "cuda":
            torch.cuda.set_device(bound)
            return
    place = find_place(os.environ)
    alone = dist.get_rank() if dist.is_initialized() else 0
    local = alone if place is None else place.local_rank
    torch.cuda.set_device(local % torch.cuda.device_count())


def _init_process_group(device: str) -> None:
    backend = settings.value("backend") or ("gloo" if device == "cpu" else None)
    if backend == "mpi":
        from distconv.mpi import init_process_group

        init_process_group()
        return
    met = dist.rendezvous("env://") if "RANK" in os.environ else iter([(dist.HashStore(), 0, 1)])  # type: ignore[attr-defined]
    store, rank, size = next(met)
    dist.init_process_group(backend or agreed_backend(store, rank, size), store=store, rank=rank, world_size=size)


def shutdown() -> None:
    """Leaves torch as it was before distconv was imported: every attribute that was replaced is what it was.

    Models of `parallelize` and `in_turn` then run whole, on this rank alone. DTensors on distconv's meshes, such as
    parameters of split channels, are torch's. The process groups stay. `init`, `parallelize`, `shard` and `in_turn`
    may be called again afterwards. In other threads that have called a distributed model, plain tensors still mix with
    DTensors as under torch's `implicit_replication`.

    Raises:
        RuntimeError: one line, within `distributed_script`, which `distconv run` puts around a script, or within a
            model's call.
    """
    if hooks.scripts or inside.run is not None:
        where = "a script that runs distributed" if hooks.scripts else "a model's call"
        raise RuntimeError(f"distconv.shutdown within {where}; accepted: after it")
    require(SHUTDOWN)
    put_back()
