"""Networks of papers: samples, targets, losses, and a small form in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.demo.unet3d import UNet3d
from mucudnn.architectures.alexnet import AlexNet
from mucudnn.architectures.meshtangling import MeshTangling
from mucudnn.architectures.resnet import ResNet
from mucudnn.architectures.vgg import VGG16

Task = Literal["classification", "segmentation", "regression"]

SMALL_BATCH = 4


@dataclass(frozen=True)
class Network:
    """A network with the samples it is usually trained on.

    build: makes the model with fresh weights in `dtype`, on torch's default device; keyword arguments are the model's.
    input_shape: of one sample, (C, *spatial).
    batch: usual batch size in training.
    task: what `sample` makes and `loss` takes as the target.
    """

    name: str
    build: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    batch: int
    task: Task
    dtype: torch.dtype = torch.float32
    reduced: Network | None = None

    def small(self) -> Network:
        """The same network, made of the same layers, so narrow and on samples so small that float64 trains quickly.

        Without dropout, so that a step is a function of weights and samples alone.
        """
        if self.reduced is None:
            raise ValueError(f"network {self.name}: is already the small one")
        return self.reduced

    def output_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the output for a batch, found without allocating anything."""
        return _output_shape(self, batch)

    def sample(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random inputs (batch, *input_shape) and targets on the CPU.

        Targets are class numbers (batch,) for classification, class probabilities in the shape of the output for
        segmentation, and numbers in (-1, 1) in the shape of the output for regression.
        """
        shape = self.output_shape(batch)
        inputs = torch.randn(batch, *self.input_shape, dtype=self.dtype, generator=generator)
        if self.task == "classification":
            return inputs, torch.randint(shape[1], (batch,), generator=generator)
        targets = torch.rand(shape, dtype=self.dtype, generator=generator)
        if self.task == "segmentation":
            return inputs, targets / targets.sum(1, keepdim=True)
        return inputs, 2 * targets - 1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The usual loss of the task, averaged over the batch: cross entropy or mean squared error."""
        return F.mse_loss(outputs, targets) if self.task == "regression" else F.cross_entropy(outputs, targets)


@functools.lru_cache(maxsize=64)
def _output_shape(network: Network, batch: int) -> tuple[int, ...]:
    with torch.device("meta"), torch.no_grad():
        return tuple(network.build()(torch.empty(batch, *network.input_shape, dtype=network.dtype)).shape)


def _cosmoflow(**given: Any) -> nn.Module:
    from examples.cosmoflow import CosmoFlow  # which needs what it reads and shows its files with

    return CosmoFlow(**given)


def _network(
    name: str,
    build: Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    batch: int,
    task: Task,
    narrow: dict[str, Any],
    small_shape: tuple[int, ...],
) -> Network:
    """A network in float32. Its small form has arguments that make it narrow, and samples of another shape."""
    small = Network(
        f"{name}-small",
        lambda **given: build(**(narrow | given)).to(torch.float64),
        small_shape,
        SMALL_BATCH,
        task,
        torch.float64,
    )
    return Network(name, build, input_shape, batch, task, reduced=small)


_IMAGE = (3, 224, 224)
_CLASSES: Task = "classification"
_NARROW: dict[str, Any] = {"classes": 5, "width": 4}
_NARROW_ENDS = _NARROW | {"hidden": 16, "pooled": 2, "dropout": 0.0}
_NARROW_CUBES = {"size": 16, "width": 2, "hidden": (16, 8), "dropout": 0.0}
_NARROW_MESHES = {"widths": (4, 6, 4)}
_MESHES_OF_1K, _MESHES_OF_2K = (partial(MeshTangling, per_block=count) for count in (3, 5))
_WIDE = partial(ResNet, depth=50, width_factor=2)

NETWORKS = {
    network.name: network
    for network in (
        _network("alexnet", AlexNet, _IMAGE, 256, _CLASSES, _NARROW_ENDS, (3, 96, 96)),
        _network("vgg16", VGG16, _IMAGE, 64, _CLASSES, _NARROW_ENDS, (3, 64, 64)),
        _network("resnet18", partial(ResNet, depth=18), _IMAGE, 256, _CLASSES, _NARROW, (3, 64, 64)),
        _network("resnet50", partial(ResNet, depth=50), _IMAGE, 64, _CLASSES, _NARROW, (3, 64, 64)),
        _network("wide_resnet50", _WIDE, _IMAGE, 64, _CLASSES, _NARROW, (3, 64, 64)),
        _network("unet3d", UNet3d, (1, 64, 64, 64), 2, "segmentation", {"width": 2, "levels": 3}, (1, 16, 16, 16)),
        _network("cosmoflow", _cosmoflow, (4, 128, 128, 128), 16, "regression", _NARROW_CUBES, (4, 16, 16, 16)),
        _network("meshtangling1k", _MESHES_OF_1K, (18, 1024, 1024), 4, "segmentation", _NARROW_MESHES, (18, 64, 64)),
        _network("meshtangling2k", _MESHES_OF_2K, (18, 2048, 2048), 1, "segmentation", _NARROW_MESHES, (18, 64, 64)),
    )
}
"""Every network by name."""
