"""Networks whose steps are predicted and measured, and the partitions of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mucudnn.networks.models import NETWORKS


@dataclass(frozen=True)
class Case:
    """A network, the shape of its whole input, and its partitions by the number of ranks.

    Attributes:
        build: makes it.
        shape: (N, C, spatial...).
        partitions: of 2 and of 4 ranks.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    partitions: tuple[str, ...]


def _network(name: str, **arguments: object) -> Callable[[], nn.Module]:
    return lambda: NETWORKS[name].build(**arguments)


PLANE = ("sample=2", "height=2", "channel=2", "sample=4", "height=2,width=2")
SPACE = ("sample=2", "depth=2", "channel=2", "depth=4", "sample=2,depth=2")

CASES = {
    "resnet18": Case(_network("resnet18"), (4, 3, 128, 128), PLANE),
    "resnet50": Case(_network("resnet50"), (4, 3, 96, 96), PLANE),
    "unet3d": Case(_network("unet3d", width=16), (2, 1, 32, 32, 32), SPACE),
    "cosmoflow": Case(_network("cosmoflow", size=64), (2, 4, 64, 64, 64), SPACE),
}
"""By name, whose steps are predicted. Each also runs on one rank."""

CHOSEN = {
    "resnet18 64x64": Case(_network("resnet18"), (4, 3, 64, 64), ()),
    "unet3d 32x32x32": Case(_network("unet3d", width=8), (2, 1, 32, 32, 32), ()),
    "cosmoflow 32x32x32": Case(_network("cosmoflow", size=32), (2, 4, 32, 32, 32), ()),
}
"""By name, whose fastest partition is predicted, and looked for among all."""

EVERY = {**CASES, **CHOSEN}
