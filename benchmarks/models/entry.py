"""What the zoo keeps of a model: how it is built, the shapes of its inputs and the partitions it is tried under."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PLANES = ("height=2,width=2", "channel=4")
VOLUMES = ("depth=2,height=2", "sample=2,channel=2")
"""The partitions of models of images, and of models of volumes and videos: one of space, one of channels."""

IN_TURN = "--parts "
"""What the name of a partition begins with whose parts are computed in turn, in one process."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how it is built, and the shapes of its inputs (N, C, spatial...)."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((4, 3, 64, 64),)

    @property
    def partitions(self) -> tuple[str, ...]:
        return (*PLANES, f"{IN_TURN}height=4") if len(self.shapes[0]) == 4 else (*VOLUMES, f"{IN_TURN}depth=4")

    def model(self) -> nn.Module:
        """With the weights of seed 0, in training mode, without dropout."""
        torch.manual_seed(0)
        return without_dropout(self.build().train())

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]


RATES = ("p", "drop_prob", "dropout", "dropout_rate", "attention_dropout", "drop_rate", "proj_drop", "drop_path_rate")


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model with every rate of dropout set to 0, so that results can be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
            continue
        for name in RATES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


class Lambda(nn.Module):
    """A model called in another way than with its inputs alone."""

    def __init__(self, model: nn.Module, way: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.way = model, way

    def forward(self, *inputs: Tensor) -> Any:
        return self.way(self.model, *inputs)


def make(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """What builds a model by the name of its class or function; the module is imported only then."""
    return lambda: getattr(importlib.import_module(module), name)(*args, **kwargs)
