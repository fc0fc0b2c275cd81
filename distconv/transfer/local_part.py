"""This rank's local tensor under another layout, for operators that read several tensors in one layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.settings.partition import ownership
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, has_partial, local_shape, owners, replicated, undoes_shard
from distconv.tensors.mesh import ranks_of, sharded_dims
from distconv.tensors.read_parts import note_part
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.exchange import exchange
from distconv.transfer.needs import window
from distconv.transfer.redistribution import redistributed_data


def local_as(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's local tensor of ``tensor`` under ``placements``.

    A plain tensor counts as replicated. Replicated to sharded is a local slice; a partial sum is reduced. The single
    element of a sharded dim of extent 1 is sent to all ranks that need it. Shards move to other dims, by one
    all-to-all, if every axis that shards the tensor still does. To gather is refused, but of a tensor without elements.
    """
    if not isinstance(tensor, DTensor):
        local, current = tensor, replicated(mesh)
    else:
        local, current = tensor._local_tensor, tensor.placements
        if tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
            current = _placements_on(mesh, tensor)
    if tuple(current) == tuple(placements):
        return local
    if not tensor.numel():  # views give the layout of nothing anew
        return local.new_empty(local_shape(mesh, placements, tensor.shape))
    if isinstance(tensor, DTensor) and any(p.is_shard() and p != to for p, to in zip(current, placements, strict=True)):
        tensor = replicate_single_dims(tensor, _single_dims(tensor, placements))
        if _trades_shards(tensor, placements):
            tensor = redistributed_data(tensor, mesh, placements)
        local, current = tensor._local_tensor, tensor.placements
    if undoes_shard(mesh, current, placements):
        raise UnsupportedOperation(f"a tensor laid out as {tuple(current)} is needed as {tuple(placements)}")
    if any(isinstance(placement, Partial) for placement in current):
        assert isinstance(tensor, DTensor)
        return tensor.redistribute(mesh, tuple(placements)).to_local()
    if isinstance(tensor, DTensor) and _cuts_a_shard_before(current, placements):
        return redistributed_data(tensor, mesh, placements)._local_tensor
    for axis, dim in sharded_dims(mesh, placements):
        if not isinstance(current[axis], Shard):
            start, stop = ownership(local.shape[dim], mesh.size(axis))[mesh.get_local_rank(axis)]
            local = local.narrow(dim, start, stop - start)
    return local if isinstance(tensor, DTensor) or local is tensor else note_part(tensor, local)


def _placements_on(mesh: DeviceMesh, tensor: DTensor) -> tuple[Placement, ...]:
    """The placements on a mesh of a tensor of another one: it must be replicated, as the norm of a gradient is."""
    if ranks_of(tensor.device_mesh) != ranks_of(mesh) or not all(
        placement.is_replicate() for placement in tensor.placements
    ):
        raise UnsupportedOperation(
            f"tensors on two meshes: {tensor.device_mesh} and {mesh};"
            " use distconv.redistribute, which changes one layout to the other"
        )
    return replicated(mesh)


def _cuts_a_shard_before(current: Sequence[Placement], target: Sequence[Placement]) -> bool:
    """Whether an axis is to shard a dim that a later one shards already, whose shards then begin and end elsewhere."""
    return any(
        before != after and any(after == other and other.is_shard() for other in current[axis + 1 :])
        for axis, (before, after) in enumerate(zip(current, target, strict=True))
    )


def replicate_single_dims(x: DTensor, dims: Sequence[int]) -> DTensor:
    """``x`` with dims of extent 1 replicated along the axes that shard them, of which the first ranks own the element.

    Collective over these axes. No autograd: the gradient of what was broadcast is a sum, which is replicated.
    """
    mesh, local, placements = x.device_mesh, x._local_tensor, x.placements
    for dim in dims:
        axes = dim_axes(mesh, placements, dim)
        if axes:
            owned = owners(mesh, axes, 1)
            local = exchange(mesh, axes, dim, owned, (window((0, 1), 1),) * len(owned)).fetch(local)
        placements = tuple(Replicate() if placement == Shard(dim) else placement for placement in placements)
    return x if placements == x.placements else wrap(local, mesh, placements, x.shape)


def _single_dims(tensor: DTensor, target: Sequence[Placement]) -> list[int]:
    """The dims of extent 1 whose shards the target does not keep."""
    pairs = zip(tensor.placements, target, strict=True)
    dims = {before.dim for before, after in pairs if isinstance(before, Shard) and before != after}
    return sorted(dim for dim in dims if tensor.shape[dim] == 1)


def _trades_shards(tensor: DTensor, target: Sequence[Placement]) -> bool:
    """Whether every axis that shards the tensor shards it afterwards, some of them another dim."""
    if has_partial(tensor.placements) or has_partial(target):
        return False
    pairs = [(before, after) for before, after in zip(tensor.placements, target, strict=True) if before.is_shard()]
    return any(before != after for before, after in pairs) and all(after.is_shard() for _, after in pairs)
