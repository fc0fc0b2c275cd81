"""Volumes of fractals and their masks, in the manner of the benchmark ScaFFold: data of any size that need no download.

A category is an iterated function system: two to four affine maps of space, drawn the more often the more volume they
keep. Its points, found by applying maps in random order, are brought into a cube and mark the voxels that they fall
into. An instance of a category has one of the numbers of its maps scaled by 0.4 to 1.6. A volume holds instances of
three random categories, the later over the earlier: each voxel has the colour of its category, 0 where there is none,
and noise; the mask has the number of the category, from 1 on.
"""

from __future__ import annotations

import colorsys
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import zarr

COLOURS = 3
"""Channels of a volume."""

FRACTALS = 3
"""Fractals of a volume."""

_CONTRACTION = 0.85
"""The largest singular value of a map: below 1, so that points stay in a bounded set."""

_FILLED = 0.03, 0.2
"""The share of a coarse cube's voxels that a category marks: neither dust, nor a block that hides all others."""

_COARSE = 32
_WALKERS = 512
_SETTLING = 20
"""Steps after which a point lies on the fractal, as closely as voxels can tell."""


@dataclass(frozen=True)
class System:
    """An iterated function system.

    Attributes:
        maps: (maps, 3, 4), each a matrix beside a translation.
    """

    maps: numpy.ndarray

    def points(self, number: int, rng: numpy.random.Generator) -> numpy.ndarray:
        """At least so many points (points, 3) of the fractal, by walkers that apply random maps."""
        matrices, translations = self._contracted(), self.maps[:, :, 3]
        weights = numpy.abs(numpy.linalg.det(matrices)) + 1e-3
        steps = -(-number // _WALKERS)
        chosen = rng.choice(len(matrices), (_SETTLING + steps, _WALKERS), p=weights / weights.sum())
        at = numpy.zeros((_WALKERS, 3))
        found = numpy.empty((len(chosen), _WALKERS, 3))
        for step, maps in enumerate(chosen):
            at = numpy.einsum("wij,wj->wi", matrices[maps], at) + translations[maps]
            found[step] = at
        return found[_SETTLING:].reshape(-1, 3)

    def _contracted(self) -> numpy.ndarray:
        matrices = self.maps[:, :, :3]
        largest = numpy.linalg.svd(matrices, compute_uv=False)[:, 0]
        return matrices * numpy.minimum(1, _CONTRACTION / largest)[:, None, None]

    def instance(self, rng: numpy.random.Generator) -> System:
        """A variation: one number of one map scaled by a factor from 0.4 to 1.6."""
        maps = self.maps.copy()
        maps.flat[rng.integers(maps.size)] *= rng.uniform(0.4, 1.6)
        return replace(self, maps=maps)

    def voxels(self, size: int, rng: numpy.random.Generator) -> numpy.ndarray:
        """Indices (voxels, 3) of the marked voxels of a cube, which the longest side of the fractal fills."""
        points = self.points(4 * size**2 * 8, rng)
        low, high = points.min(0), points.max(0)
        points = (points - (low + high) / 2) / (high - low).max() + 0.5
        flat = numpy.ravel_multi_index((points * size).astype("i8").clip(0, size - 1).T, (size,) * 3)
        return numpy.stack(numpy.unravel_index(numpy.unique(flat), (size,) * 3), 1)


def category(rng: numpy.random.Generator) -> System:
    """The first system drawn whose fractal is neither dust nor a block."""
    while True:
        system = System(rng.uniform(-1, 1, (rng.integers(2, 5), 3, 4)))
        if _FILLED[0] < len(system.voxels(_COARSE, rng)) / _COARSE**3 < _FILLED[1]:
            return system


class Scenes:
    """Volumes (3, size, size, size) in float32 and masks (size, size, size) in uint8, the same for the same seed.

    Args:
        size: voxels along a side.
        categories: kinds of fractals.
        noise: standard deviation of what is added to each voxel; colours are in [0, 1].
        seed: of categories, instances and noise.
    """

    def __init__(self, size: int, categories: int, noise: float, seed: int) -> None:
        self._size, self._noise, self._seed = size, noise, seed
        rng = numpy.random.default_rng((seed, 0))
        self._systems = [category(rng) for _ in range(categories)]
        self._colours = numpy.array([colorsys.hsv_to_rgb(kind / categories, 1, 1) for kind in range(categories)])

    def scene(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The volume and the mask with a number."""
        rng = numpy.random.default_rng((self._seed, 1, number))
        volume = numpy.zeros((COLOURS,) + (self._size,) * 3, "f4")
        mask = numpy.zeros((self._size,) * 3, "u1")
        for chosen in rng.integers(len(self._systems), size=FRACTALS):
            depth, height, width = self._systems[chosen].instance(rng).voxels(self._size, rng).T
            volume[:, depth, height, width] = self._colours[chosen][:, None]
            mask[depth, height, width] = chosen + 1
        volume += self._noise * rng.standard_normal(volume.shape, "f4")
        return volume, mask


def write(path: Path, scenes: Scenes, size: int, number: int) -> None:
    """A folder of Zarr, whole or not at all: arrays "volume" (number, 3, size, size, size) and "mask" without colours.

    A chunk is a quarter of a sample, along depth and height, so that ranks with such a part read only theirs.
    """
    partial = Path(f"{path}.{os.getpid()}")
    group = zarr.open_group(str(partial), mode="w")
    part = -(-size // 2), -(-size // 2), size
    shape = (size,) * 3
    volumes = group.create_array("volume", shape=(number, COLOURS, *shape), chunks=(1, COLOURS, *part), dtype="f4")
    masks = group.create_array("mask", shape=(number, *shape), chunks=(1, *part), dtype="u1")
    for at in range(number):
        volumes[at], masks[at] = scenes.scene(at)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
