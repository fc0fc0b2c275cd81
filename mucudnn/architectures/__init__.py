"""Networks of papers that commands know by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from .alexnet import AlexNet
from .meshtangling import MeshTangling
from .resnet import ResNet
from .vgg import VGG16

__all__ = ["NAMED", "VGG16", "AlexNet", "MeshTangling", "NamedNetwork", "ResNet"]


class NamedNetwork(NamedTuple):
    """A network, the shape (C, *spatial) of its usual sample, and the usual number of samples."""

    build: Callable[..., nn.Module]  # Makes the module; keyword arguments are the module's own.
    sample: tuple[int, ...]
    batch: int


NAMED = {
    "alexnet": NamedNetwork(AlexNet, (3, 224, 224), 256),
    "vgg16": NamedNetwork(VGG16, (3, 224, 224), 64),
    "resnet18": NamedNetwork(partial(ResNet, depth=18), (3, 224, 224), 256),
    "resnet50": NamedNetwork(partial(ResNet, depth=50), (3, 224, 224), 64),
    "wide_resnet50": NamedNetwork(partial(ResNet, depth=50, width_factor=2), (3, 224, 224), 64),
    "meshtangling1k": NamedNetwork(partial(MeshTangling, per_block=3), (18, 1024, 1024), 4),
    "meshtangling2k": NamedNetwork(partial(MeshTangling, per_block=5), (18, 2048, 2048), 1),
}
