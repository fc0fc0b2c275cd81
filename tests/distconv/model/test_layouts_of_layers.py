"""Layers whose input lies otherwise than layers leave it, or than their gradient does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from reference import errors
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.gloo


class Whole(nn.Module):
    """A layer of a tensor that every rank has whole, whose result meets a sharded one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        whole = x.mean((2, 3))[:, :, None, None] * torch.linspace(-1, 2, 64, dtype=x.dtype).view(8, 8)
        y = self.layer(whole.sin())
        return y * F.interpolate(x, y.shape[2:])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "average": lambda: nn.AvgPool2d(2),
    "maximum": lambda: nn.MaxPool2d(3, 1, 1),
    "adaptive average": lambda: nn.AdaptiveAvgPool2d(3),
    "adaptive maximum": lambda: nn.AdaptiveMaxPool2d(3),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
}


class Transposed(nn.Module):
    """A norm whose channels were samples, so that the axis of channels shards its samples."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 1, bias=False), norm
        with torch.no_grad():
            norm.weight.copy_(torch.arange(1.0, 5.0))  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x).transpose(0, 1).contiguous()).transpose(0, 1) + x


class Pieces(nn.Module):
    """Channels of one position, whose height and width are sharded, in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.convolution(x).split([2, 4], 1)
        return torch.cat([second * 2, first, *second.unbind(1)[0].unsqueeze(1).chunk(1, 1)], 1)


def whole(name: str, partition: str) -> Any:
    return errors(lambda: Whole(LAYERS[name]()), [(4, 4, 9, 8)], partition)


def transposed(kind: str, partition: str) -> Any:
    return errors(
        lambda: Transposed({"batch": nn.BatchNorm2d(4), "group": nn.GroupNorm(2, 4)}[kind]), [(4, 4, 3, 2)], partition
    )


def pieces(partition: str) -> Any:
    return errors(Pieces, [(2, 4, 5, 5)], partition)


@pytest.mark.parametrize("partition", ["height=2", "sample=2"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_whole_input_whose_gradient_is_sharded(
    ranks: Callable[[int], Ranks], name: str, partition: str
) -> None:
    for found in ranks(2).run(whole, name, partition):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("size, partition", [(2, "channel=2"), (4, "sample=2,channel=2")])
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_norms_whose_samples_are_sharded_by_the_axis_of_channels(
    ranks: Callable[[int], Ranks], kind: str, size: int, partition: str
) -> None:
    for found in ranks(size).run(transposed, kind, partition):
        assert max(found.values()) < 1e-12, found


def test_pieces_of_channels_where_other_dims_are_shorter_than_their_axes(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(pieces, "height=2,width=2"):
        assert max(found.values()) < 1e-12, found
