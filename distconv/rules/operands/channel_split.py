"""Split channels: a layer's block on this rank, and the exchanges that fetch its channels and add up its filters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distconv.settings.channels import Block, ChannelMap, block, weight_boxes, weight_dims
from distconv.settings.partition import flat_index, shards_channels
from distconv.tensors.layouts import Layout, coordinate, input_layout, owners
from distconv.tensors.mesh import axis_names
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval


@dataclass(frozen=True)
class Split:
    """This rank's block. With one rank along the channels everything is local, and the exchanges do nothing."""

    axes: tuple[int, ...]  # The mesh axes that shard the channels of x and y.
    block: Block
    channels: Exchange  # Fetches the channels of x that the block reads; its adjoint adds up dL/dx.
    filters: Exchange  # Fetches the filters of dL/dy that the block makes; its adjoint adds up y.
    weight: tuple[Placement, ...]  # The layout of the weight in which each rank has its block.
    vector: tuple[Placement, ...]  # The layout of a tensor with one number per filter.

    @cached_property
    def is_local(self) -> bool:
        """Whether this rank makes its filters of y alone."""
        return self.filters.is_identity

    @cached_property
    def is_whole(self) -> bool:
        """Whether it also reads no other rank's channels."""
        return self.is_local and self.channels.is_identity


@planned(4096)
def channel_layout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The layout of x once the ``channel`` and ``filter`` axes that replicate it shard its channels: a slice."""
    names = axis_names(mesh)
    return tuple(
        Shard(1) if shards_channels(name) and placement.is_replicate() and mesh.size(axis) > 1 else placement
        for axis, (name, placement) in enumerate(zip(names, placements, strict=True))
    )


def parameter_layout(
    mesh: DeviceMesh, current: Sequence[Placement], placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """How a layer needs a parameter whose channels are sharded: whole along those axes that shard other dims of x.

    So it is in a layer whose length is what were channels, as channel attention makes them.
    """
    names = axis_names(mesh)
    return tuple(
        Replicate() if shards_channels(name) and of in (Shard(0), Shard(1)) and p.is_shard() and p != Shard(1) else of
        for name, of, p in zip(names, current, placements, strict=True)
    )


def layer_input(func: Any, x: Any, *others: Any) -> Layout:
    """The layout of a layer's input, its channels sharded where the mesh has an axis for them."""
    mesh, placements = input_layout(func, x, *others)
    return mesh, channel_layout(mesh, placements)


def norm_input(func: Any, x: Any, *others: Any) -> Layout:
    """The layout in which a norm of each channel takes its input.

    An axis that shards channels may shard another dim of x, as attention leaves its heads. Where the norm's weight is
    sharded along it, x trades that dim for its channels: these are as many numbers, and nothing is gathered.
    """
    mesh, placements = layer_input(func, x, *others)
    vectors = [other for other in others if isinstance(other, DTensor) and other.dim() == 1]
    return mesh, tuple(
        Shard(1) if p.is_shard() and any(vector.placements[axis].is_shard() for vector in vectors) else p
        for axis, p in enumerate(placements)
    )


@planned(4096)
def make_split(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    layer: ChannelMap,
    current: tuple[Placement, ...],
    inner: tuple[int, ...],
    algorithm: str,
) -> Split:
    """The split of a layer whose x has the layout ``placements``, as ``channel_layout`` gives it.

    The axes that shard the channels of x shard those of y, the ``inner`` ones within the others: not where y is a
    DTensor, whose axes follow their order in the mesh.

    A weight that is replicated along an axis in its layout ``current`` is cut there by the algorithm, at no cost. A
    weight made of activations may be sharded as no block is, such as along its rows; then it is redistributed.
    """
    axes = tuple(axis for axis, p in enumerate(placements) if p == Shard(1) and mesh.size(axis) > 1)
    names = [axis_names(mesh)[axis] for axis in axes]
    sizes = [mesh.size(axis) for axis in axes]
    dims = list(weight_dims(layer, algorithm, dict(zip(names, sizes, strict=True))))
    if layer.groups == 1:  # a block of a grouped layer has all weights of a group
        usable = {axis: p.dim for axis, p in enumerate(current) if axis in axes and p in (Shard(0), Shard(1))}
        dims = [usable.get(axis, dim) for axis, dim in zip(axes, dims, strict=True)]
        for at, axis in enumerate(axes):
            # A shard can be cut by a later axis only.
            if axis not in usable and any(usable.get(later) == dims[at] for later in axes[at + 1 :]):
                dims[at] = 1 - dims[at]
    blocks = [block(layer, box) for box in weight_boxes(layer, dims, sizes)]
    whole = [Shard(dims[axes.index(axis)]) if axis in axes else Replicate() for axis in range(mesh.ndim)]
    return Split(
        axes,
        blocks[coordinate(mesh, axes)],
        _exchange(mesh, axes, owners(mesh, axes, layer.channels), [one.channels for one in blocks]),
        _exchange(mesh, axes, filter_owners(mesh, axes, inner, layer.filters), [one.filters for one in blocks]),
        tuple(whole),
        tuple(Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)),
    )


def filter_owners(mesh: DeviceMesh, axes: tuple[int, ...], inner: tuple[int, ...], extent: int) -> tuple[Interval, ...]:
    """The filters of y that each rank along the axes owns; the ``inner`` axes shard them within the others."""
    order = sorted(range(len(axes)), key=lambda at: axes[at] in inner)
    owned = owners(mesh, [axes[at] for at in order], extent)
    sizes = [mesh.size(axes[at]) for at in order]
    places = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    return tuple(owned[flat_index([place[at] for at in order], sizes)] for place in places)


def _exchange(
    mesh: DeviceMesh, axes: tuple[int, ...], owned: tuple[Interval, ...], read: Sequence[Interval]
) -> Exchange:
    extent = max(stop for _, stop in owned)
    return exchange(mesh, axes, 1, owned, tuple(window(interval, extent) for interval in read))
