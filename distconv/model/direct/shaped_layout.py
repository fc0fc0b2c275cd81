"""The layout of an activation: an object for each mesh, placements and whole shape, which caches decisions for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from distconv.tensors.dtensors import CHANNELS_LAST, may_be_channels_last, row_major_spec
from distconv.tensors.layouts import dim_axes, local_shape, owners
from distconv.transfer.tracing import planned
from mucudnn.process import Recent

MOST_PLANS = 1024  # The most calls whose decisions are cached, for inputs of one layout.


class ShapedLayout:
    """A mesh, placements and a whole shape. Made by `shaped_layout`, which returns the same object for equal ones."""

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> None:
        self.mesh, self.placements, self.shape = mesh, placements, shape
        shards = [type(placement) is Shard for placement in placements]
        self.is_plain = all(
            shard or placement.is_replicate() for shard, placement in zip(shards, placements, strict=True)
        )
        """Whether there are neither partial sums nor shards of a special kind."""
        self.is_spread = self.is_plain and all(shard or mesh.size(axis) == 1 for axis, shard in enumerate(shards))
        """Whether no two ranks have the same elements."""
        self.is_filled = self.is_plain and 0 not in local_shape(mesh, placements, shape)  # This rank has elements.
        self.is_thin = self.is_plain and 1 in [
            min(stop - start for start, stop in owners(mesh, dim_axes(mesh, placements, dim), extent))
            for dim, extent in enumerate(shape)
        ]
        """Whether some rank has a single position of a dim."""
        self.is_contiguous = len(shape) in CHANNELS_LAST and not may_be_channels_last(mesh, placements, tuple(shape))
        """Whether tensors must be contiguous, since channels_last would not be the format of all ranks' parts."""
        self.plans: Recent[Any, Any] = Recent(MOST_PLANS)
        """Decisions of functions whose input has this layout, by everything else on which they depend."""
        self.specs: dict[torch.dtype, DTensorSpec] = {}  # What `spec` has made.

    def __repr__(self) -> str:
        return f"ShapedLayout({tuple(self.shape)}, {self.placements} on {self.mesh})"

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The description of a DTensor of this layout; its strides are those of a contiguous tensor."""
        found = self.specs.get(dtype)
        if found is None:
            found = self.specs[dtype] = row_major_spec(self.mesh, self.placements, tuple(self.shape), dtype)
        return found

    def has_parts_of(self, placements: Sequence[Placement]) -> bool:
        """Whether a rank has the same part in a layout of the same mesh and shape: axes of one rank shard nothing."""
        pairs = zip(self.placements, placements, strict=True)
        return all(own == other or self.mesh.size(axis) == 1 for axis, (own, other) in enumerate(pairs))

    def of_shape(self, shape: tuple[int, ...]) -> ShapedLayout:
        """The same layout of another shape."""
        return shaped_layout(self.mesh, self.placements, torch.Size(shape))


@planned(8192)
def shaped_layout(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> ShapedLayout:
    """The layout object of a mesh, placements and a whole shape."""
    return ShapedLayout(mesh, placements, shape)
