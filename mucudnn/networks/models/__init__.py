"""The networks of the benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .alexnet import AlexNet
from .cosmoflow import CosmoFlow
from .densenet import DenseNet
from .meshtangling import MeshTangling
from .network import Network, Task
from .resnet import ResNet
from .unet3d import UNet3d
from .vgg import VGG16

__all__ = ["NETWORKS", "VGG16", "AlexNet", "CosmoFlow", "DenseNet", "MeshTangling", "Network", "ResNet", "UNet3d"]

SMALL_BATCH = 4


def _network(
    name: str,
    model: Callable[..., nn.Module],
    task: Task,
    arguments: dict[str, Any],
    shape: tuple[int, ...],
    batch: int,
    narrow: dict[str, Any],
    small: tuple[int, ...],
) -> Network:
    """A network in float32, and its small form in float64: with arguments that make it narrow, on samples so small."""
    reduced = Network(
        f"{name}-small",
        lambda **given: model(**(arguments | narrow | given)).to(torch.float64),
        small,
        SMALL_BATCH,
        task,
        torch.float64,
    )
    return Network(
        name, lambda **given: model(**(arguments | given)).to(torch.float32), shape, batch, task, reduced=reduced
    )


_NARROW = {"classes": 5, "width": 4}
_NARROW_ENDS = _NARROW | {"hidden": 16, "pooled": 2, "dropout": 0.0}
_NARROW_CUBES = {"size": 16, "width": 2, "hidden": (16, 8), "dropout": 0.0}
_NARROW_DENSE = _NARROW | {"depth": 10, "growth": 3}
_WIDE = {"depth": 50, "width_factor": 2}

NETWORKS = {
    network.name: network
    for network in (
        _network("alexnet", AlexNet, "classification", {}, (3, 224, 224), 256, _NARROW_ENDS, (3, 96, 96)),
        _network("vgg16", VGG16, "classification", {}, (3, 224, 224), 64, _NARROW_ENDS, (3, 64, 64)),
        _network("resnet18", ResNet, "classification", {"depth": 18}, (3, 224, 224), 256, _NARROW, (3, 64, 64)),
        _network("resnet50", ResNet, "classification", {"depth": 50}, (3, 224, 224), 64, _NARROW, (3, 64, 64)),
        _network("wide_resnet50", ResNet, "classification", _WIDE, (3, 224, 224), 64, _NARROW, (3, 64, 64)),
        _network("densenet40", DenseNet, "classification", {}, (3, 32, 32), 256, _NARROW_DENSE, (3, 16, 16)),
        _network("unet3d", UNet3d, "segmentation", {}, (1, 64, 64, 64), 2, {"width": 2, "levels": 3}, (1, 16, 16, 16)),
        _network("cosmoflow", CosmoFlow, "regression", {}, (4, 128, 128, 128), 16, _NARROW_CUBES, (4, 16, 16, 16)),
        *(
            _network(
                f"meshtangling{size}k",
                MeshTangling,
                "segmentation",
                {"per_block": per_block},
                (18, 1024 * size, 1024 * size),
                batch,
                {"widths": (4, 6, 4)},
                (18, 64, 64),
            )
            for size, per_block, batch in ((1, 3, 4), (2, 5, 1))
        ),
    )
}
"""Every network by name."""
