"""Whole dims for every rank of some axes; the gradients of what each rank made of them are added at the owners."""

from __future__ import annotations

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from distconv.settings.partition import flat_index
from distconv.tensors.layouts import dim_axes, owners
from distconv.transfer.exchange import Exchanges, exchange
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import length


@planned(1024)
def unsharding(
    mesh: DeviceMesh, before: tuple[Placement, ...], after: tuple[Placement, ...], shape: tuple[int, ...]
) -> Exchanges:
    """From one layout to another that differs from it only in axes that shard no longer. Made without communication."""
    found = []
    for dim, extent in enumerate(shape):
        axes, kept = dim_axes(mesh, before, dim), dim_axes(mesh, after, dim)
        if axes == kept:
            continue
        wanted = owners(mesh, kept, extent)
        needs = []
        for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
            along = [at for axis, at in zip(axes, place, strict=True) if axis in kept]
            interval = wanted[flat_index(along, map(mesh.size, kept))]
            needs.append(window(interval, extent) if length(interval) else ())
        found.append(exchange(mesh, axes, dim, owners(mesh, axes, extent), tuple(needs)))
    return Exchanges(found)
