"""DTensors from local tensors and back, without communication."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distconv.layouts import replicated, undoes_shard
from distconv.partition import ownership, sharded_dims
from distconv.refusal import UnsupportedOperation


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of global ``shape`` whose shard on this rank is ``local``; no communication, no autograd.

    A shard with gaps is copied; channels_last and whole tensors stay as they are.
    """
    strides = [1] * len(shape)
    order = range(len(shape) - 1, -1, -1)
    if not local.is_contiguous():
        if local.shape == tuple(shape) and all(placement.is_replicate() for placement in placements):
            return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), local.stride(), local.dtype))
        if local.dim() in (4, 5) and local.stride(1) == 1 and local.shape[1] > 1:
            order = (1, *range(len(shape) - 1, 1, -1), 0)  # type: ignore[assignment]
            local = local.contiguous(memory_format=torch.channels_last if local.dim() == 4 else torch.channels_last_3d)
        else:
            local = local.contiguous()
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), tuple(strides), local.dtype))


def _dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    # Not DTensor(...): its __init__ does nothing, and takes three times as long as all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@functools.lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def local_as(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of ``tensor`` under ``placements``.

    A plain tensor counts as replicated. Replicated to sharded is a local slice; a partial sum is reduced. To undo or
    change a shard is refused.
    """
    if not isinstance(tensor, DTensor):
        local, current = tensor, replicated(mesh)
    else:
        local, current = tensor._local_tensor, tensor.placements
        if tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
            current = _elsewhere(tensor, mesh)
    if tuple(current) == tuple(placements):
        return local
    if undoes_shard(mesh, current, placements):
        raise UnsupportedOperation(f"a tensor laid out as {tuple(current)} is needed as {tuple(placements)}")
    if any(isinstance(placement, Partial) for placement in current):
        assert isinstance(tensor, DTensor)
        return tensor.redistribute(mesh, tuple(placements)).to_local()
    if any(not isinstance(current[axis], Shard) for axis, _ in sharded_dims(mesh, placements)):
        _refuse_nesting_in_a_shard(current, placements)
    for axis, dim in sharded_dims(mesh, placements):
        if not isinstance(current[axis], Shard):
            start, stop = ownership(local.shape[dim], mesh.size(axis))[mesh.get_local_rank(axis)]
            local = local.narrow(dim, start, stop - start)
    return local


def _elsewhere(tensor: DTensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The layout of a tensor from another mesh: replicated on the same ranks, as the norm of a gradient is."""
    same = sorted(tensor.device_mesh.mesh.flatten().tolist()) == sorted(mesh.mesh.flatten().tolist())
    if not same or not all(placement.is_replicate() for placement in tensor.placements):
        raise UnsupportedOperation(
            f"tensors on two meshes: {tensor.device_mesh} and {mesh}; distconv.redistribute brings one to the other"
        )
    return replicated(mesh)


def _refuse_nesting_in_a_shard(current: Sequence[Placement], target: Sequence[Placement]) -> None:
    for axis, (before, after) in enumerate(zip(current, target, strict=True)):
        if before != after and any(after == other and other.is_shard() for other in current[axis + 1 :]):
            raise UnsupportedOperation(f"a tensor laid out as {tuple(current)} is needed as {tuple(target)}")
