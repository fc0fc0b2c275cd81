"""The part of a batch that a rank reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.reading.view import Region
from distconv.settings.partition import AXES, Interval, Kind, ownership


@dataclass(frozen=True)
class Share:
    """A rank's place on a mesh, for data (samples, ...).

    Samples are sharded by dim 0; dims of space count from the end, so labels without channels have the images' layout.
    Axes that shard channels leave data as it is: a model takes its channels itself.

    Attributes:
        names, sizes: of the axes of the mesh.
        coordinate: of the rank on them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def samples(self, count: int) -> Interval:
        """The interval of a batch of samples that is the rank's."""
        if "sample" not in self.names:
            return 0, count
        axis = self.names.index("sample")
        return ownership(count, self.sizes[axis])[self.coordinate[axis]]

    def portion(self, batch: Sequence[Any], coordinate: int | None = None) -> Sequence[Any]:
        """The indices of a batch whose samples a rank makes: this rank, or that at a coordinate on the axis of samples.

        A rank without a sample of the batch makes one all the same, for its shape and dtype.
        """
        if "sample" not in self.names:
            return batch
        axis = self.names.index("sample")
        start, stop = ownership(len(batch), self.sizes[axis])[self.of_samples if coordinate is None else coordinate]
        return batch[start:stop] if stop > start else batch[:1]

    @property
    def of_samples(self) -> int:
        """The rank's coordinate on the axis of samples."""
        return self.coordinate[self.names.index("sample")] if "sample" in self.names else 0

    @property
    def cuts_samples(self) -> bool:
        """Whether a sample is sharded over several ranks."""
        return any(
            AXES[name].kind is Kind.SPACE and size > 1 for name, size in zip(self.names, self.sizes, strict=True)
        )

    def placements(self, ndim: int) -> tuple[Placement, ...]:
        """The placements of a batch of `ndim` dims on the mesh."""
        result: list[Placement] = []
        for name in self.names:
            axis = AXES[name]
            dim = 0 if axis.kind is Kind.SAMPLES else ndim + axis.dim if axis.kind is Kind.SPACE else 0
            result.append(Shard(dim) if dim > 0 or axis.kind is Kind.SAMPLES else Replicate())
        return tuple(result)

    def region(self, shape: Sequence[int]) -> Region:
        """The part of a batch of its own samples that the rank reads."""
        box = [range(extent) for extent in shape]
        for placement, size, at in zip(self.placements(len(shape)), self.sizes, self.coordinate, strict=True):
            if isinstance(placement, Shard) and placement.dim:
                start, stop = ownership(len(box[placement.dim]), size)[at]
                box[placement.dim] = box[placement.dim][start:stop]
        return tuple(box)
