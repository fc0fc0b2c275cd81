"""The networks that ship with the package, by the names that commands know them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from .alexnet import AlexNet
from .cosmoflow import CosmoFlow
from .meshtangling import MeshTangling
from .resnet import ResNet
from .unet3d import UNet3d
from .vgg import VGG16

__all__ = ["NETWORKS", "VGG16", "AlexNet", "CosmoFlow", "MeshTangling", "Network", "ResNet", "UNet3d"]


@dataclass(frozen=True)
class Network:
    """A network and the samples that it usually takes."""

    build: Callable[..., nn.Module]  # Makes the module; keyword arguments are the module's own.
    input_shape: tuple[int, ...] | None = None  # (C, *spatial) of a sample, `None` if unknown.
    batch: int | None = None  # Usual number of samples, `None` if unknown.


NETWORKS = {
    "alexnet": Network(AlexNet, (3, 224, 224), 256),
    "vgg16": Network(VGG16, (3, 224, 224), 64),
    "resnet18": Network(partial(ResNet, depth=18), (3, 224, 224), 256),
    "resnet50": Network(partial(ResNet, depth=50), (3, 224, 224), 64),
    "wide_resnet50": Network(partial(ResNet, depth=50, width_factor=2), (3, 224, 224), 64),
    "unet3d": Network(UNet3d, (1, 64, 64, 64), 2),
    "cosmoflow": Network(CosmoFlow, (4, 128, 128, 128), 16),
    "meshtangling1k": Network(partial(MeshTangling, per_block=3), (18, 1024, 1024), 4),
    "meshtangling2k": Network(partial(MeshTangling, per_block=5), (18, 2048, 2048), 1),
}
