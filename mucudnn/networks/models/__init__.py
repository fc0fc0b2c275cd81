"""The networks of the benchmarks and tests, and the convolutions that they consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .alexnet import AlexNet
from .cosmoflow import CosmoFlow
from .densenet import DenseNet
from .layer import Layer, convolutions
from .meshtangling import MeshTangling
from .network import Network, Task
from .resnet import ResNet
from .unet3d import UNet3d
from .vgg import VGG16

__all__ = [
    "NETWORKS",
    "VGG16",
    "AlexNet",
    "CosmoFlow",
    "DenseNet",
    "Layer",
    "MeshTangling",
    "Network",
    "ResNet",
    "Task",
    "UNet3d",
    "convolutions",
]


def _builder(model: Callable[..., nn.Module], defaults: dict[str, Any], dtype: torch.dtype) -> Callable[..., nn.Module]:
    return lambda **arguments: model(**(defaults | arguments)).to(dtype)


def _network(
    name: str,
    model: Callable[..., nn.Module],
    task: Task,
    full: tuple[dict[str, Any], tuple[int, ...], int],
    small: tuple[dict[str, Any], tuple[int, ...], int],
) -> Network:
    """Each of `full` and `small`: the model's arguments, the shape of a sample, the batch size."""
    arguments, shape, batch = small
    reduced = Network(
        f"{name}-small", _builder(model, arguments, torch.float64), shape, batch, task, dtype=torch.float64
    )
    arguments, shape, batch = full
    return Network(name, _builder(model, arguments, torch.float32), shape, batch, task, reduced=reduced)


_NARROW = {"classes": 5, "hidden": 16, "pooled": 2, "dropout": 0.0}

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _network(
            "alexnet",
            AlexNet,
            "classification",
            ({}, (3, 224, 224), 256),
            (_NARROW | {"width": 4}, (3, 96, 96), 4),
        ),
        _network(
            "vgg16",
            VGG16,
            "classification",
            ({}, (3, 224, 224), 64),
            (_NARROW | {"width": 4}, (3, 64, 64), 4),
        ),
        _network(
            "resnet18",
            ResNet,
            "classification",
            ({"depth": 18}, (3, 224, 224), 256),
            ({"depth": 18, "classes": 5, "width": 4}, (3, 64, 64), 4),
        ),
        _network(
            "resnet50",
            ResNet,
            "classification",
            ({"depth": 50}, (3, 224, 224), 64),
            ({"depth": 50, "classes": 5, "width": 4}, (3, 64, 64), 4),
        ),
        _network(
            "wide_resnet50",
            ResNet,
            "classification",
            ({"depth": 50, "width_factor": 2}, (3, 224, 224), 64),
            ({"depth": 50, "classes": 5, "width": 4, "width_factor": 2}, (3, 64, 64), 4),
        ),
        _network(
            "densenet40",
            DenseNet,
            "classification",
            ({"depth": 40, "growth": 12}, (3, 32, 32), 256),
            ({"depth": 10, "growth": 3, "classes": 5, "width": 4}, (3, 16, 16), 4),
        ),
        _network(
            "unet3d",
            UNet3d,
            "segmentation",
            ({}, (1, 64, 64, 64), 2),
            ({"width": 2, "levels": 3}, (1, 16, 16, 16), 4),
        ),
        _network(
            "cosmoflow",
            CosmoFlow,
            "regression",
            ({"size": 128}, (4, 128, 128, 128), 16),
            ({"size": 16, "width": 2, "hidden": (16, 8), "dropout": 0.0}, (4, 16, 16, 16), 4),
        ),
        _network(
            "meshtangling1k",
            MeshTangling,
            "segmentation",
            ({"per_block": 3}, (18, 1024, 1024), 4),
            ({"per_block": 3, "widths": (4, 6, 4)}, (18, 64, 64), 4),
        ),
        _network(
            "meshtangling2k",
            MeshTangling,
            "segmentation",
            ({"per_block": 5}, (18, 2048, 2048), 1),
            ({"per_block": 5, "widths": (4, 6, 4)}, (18, 64, 64), 4),
        ),
    )
}
"""Every network by name."""
