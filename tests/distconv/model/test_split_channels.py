"""Networks whose channels are sharded, by every algorithm, beside one process; what they move; what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import errors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gloo

Network = tuple[Callable[[], nn.Module], list[tuple[int, ...]]]


class Net(nn.Module):
    """A function of some layers and inputs."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.layers, *inputs)


def classes(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % 5


def squeezed(m: Any, x: Tensor) -> Tensor:
    y = m[0](x)
    return y * torch.sigmoid(m[2](F.relu(m[1](y.mean((2, 3), keepdim=True)))))


def gated(m: Any, x: Tensor) -> Tensor:
    a, b = m[0](x).chunk(2, 1)
    return m[1](a) * m[1](b)


def shuffled(m: Any, x: Tensor) -> Tensor:
    n, c, h, w = (y := m[0](x)).shape
    return m[1](y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


def residual(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m[1](m[0](x)), inplace=True)
    return F.relu(m[2](x) + m[4](m[3](y)), inplace=True)


def permuted(m: Any, x: Tensor) -> Tensor:
    y = m[1](m[0](x)[:, torch.tensor([3, 1, 0, 5, 2, 4])])
    return m[2](F.adaptive_avg_pool2d(y, 1).flatten(1)) + m[3](F.adaptive_max_pool2d(y, 1).flatten(1))


IMAGES = (2, 3, 6, 8)
NETWORKS: dict[str, Network] = {
    "classifier": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU(True), nn.Flatten(), nn.Linear(60, 6), nn.Tanh(), nn.Linear(6, 2)
        ),
        [(3, 3, 7, 6)],
    ),
    "concatenation": (
        lambda: Net(
            lambda m, x: m[2](torch.cat([m[0](x), m[1](x), x], 1)),
            nn.Conv2d(3, 5, 3, padding=1),
            nn.Conv2d(3, 2, 1),
            nn.Conv2d(10, 3, 1),
        ),
        [IMAGES],
    ),
    "channels in another order, before pools": (
        lambda: Net(permuted, nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3), nn.Linear(6, 2), nn.Linear(6, 2)),
        [IMAGES],
    ),
    "pools": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.MaxPool2d(2, 1),
            nn.AvgPool2d(3, 2, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 4),
        ),
        [(2, 3, 9, 8)],
    ),
    "resizes and shuffles": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(6, 8, 3),
            nn.PixelShuffle(2),
            nn.PixelUnshuffle(2),
            nn.ChannelShuffle(4),
        ),
        [IMAGES],
    ),
    "softmax over channels": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Softmax(1), nn.LogSoftmax(1)), [IMAGES]),
    "PReLU": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.Conv2d(6, 6, 1), nn.PReLU()), [IMAGES]),
    "squeeze and excitation": (
        lambda: Net(squeezed, nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)),
        [IMAGES],
    ),
    "padded channels": (
        lambda: Net(lambda m, x: F.pad(m[0](x)[:, 1:, ::2], (0, 0, 0, 0, 2, 1)), nn.Conv2d(3, 5, 3)),
        [IMAGES],
    ),
    "halves": (lambda: Net(gated, nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 1)), [IMAGES]),
    "channel shuffle": (lambda: Net(shuffled, nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1, groups=2)), [IMAGES]),
    "cross entropy": (
        lambda: Net(
            lambda m, x: F.cross_entropy(
                m[0](x), classes(2, 4, 6), ignore_index=2, weight=torch.arange(1.0, 6).double()
            ),
            nn.Conv2d(3, 5, 3),
        ),
        [IMAGES],
    ),
    "cross entropy, smooth": (
        lambda: Net(
            lambda m, x: F.cross_entropy(m[0](x).flatten(2).mean(2), classes(2), label_smoothing=0.1),
            nn.Conv2d(3, 5, 3),
        ),
        [IMAGES],
    ),
    "cross entropy, each": (
        lambda: Net(lambda m, x: F.cross_entropy(m[0](x), classes(2, 4, 6), reduction="none"), nn.Conv2d(3, 5, 3)),
        [IMAGES],
    ),
    "squared error": (
        lambda: Net(lambda m, x: F.mse_loss(m[0](x), torch.ones(2, 5, 4, 6).double()), nn.Conv2d(3, 5, 3)),
        [IMAGES],
    ),
    "groups and norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 12, 3, groups=6),
            nn.GroupNorm(4, 12),
            nn.ConvTranspose2d(12, 8, 3, 2, groups=4),
            nn.InstanceNorm2d(8, affine=True),
        ),
        [IMAGES],
    ),
    "residual block": (
        lambda: Net(
            residual,
            nn.Conv2d(3, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.Conv2d(3, 5, 1),
            nn.Conv2d(7, 5, 3, padding=1),
            nn.BatchNorm2d(5),
        ),
        [IMAGES],
    ),
    "shared weights": (lambda: Net(lambda m, x: m[0](torch.tanh(m[0](x))), nn.Conv2d(3, 3, 3, padding=1)), [IMAGES]),
    "recomputation": (
        lambda: Net(
            lambda m, x: checkpoint(m[1], m[0](x), use_reentrant=False),
            nn.Conv2d(3, 6, 3),
            nn.Sequential(nn.ReLU(), nn.Conv2d(6, 3, 3)),
        ),
        [IMAGES],
    ),
    "layer norm of channels": (
        lambda: Net(
            lambda m, x: m[2](m[1](m[0](x).permute(0, 2, 3, 1))), nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 8)
        ),
        [IMAGES],
    ),
}
FEATURES: dict[str, Network] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4, bias=False)),
        [(4, 6)],
    ),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)), [(2, 3, 6)]),
    "flattened lines": (lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Flatten(), nn.Linear(15, 3)), [(2, 4, 6)]),
}


def compare(networks: list[str], partition: str, algorithm: str) -> dict[str, dict[str, float]]:
    result = {}
    for name in networks:
        build, shapes = (NETWORKS | FEATURES)[name]
        try:
            result[name] = errors(build, shapes, partition, channel_algorithm=algorithm)
        except Exception as error:
            error.add_note(f"in {name!r} on {partition}, algorithm {algorithm}")
            raise
    return result


@pytest.mark.parametrize(
    "size, partition, algorithm, networks",
    [
        (2, "channel=2", "x", NETWORKS | FEATURES),
        (3, "channel=3", "y", NETWORKS | FEATURES),
        (4, "channel=4", "auto", NETWORKS | FEATURES),
        (4, "channel=2,filter=2", "w", NETWORKS | FEATURES),
        (4, "filter=2,channel=2", "y", {"classifier": None, "concatenation": None, "groups and norms": None}),
        (4, "height=2,channel=2", "auto", NETWORKS),
        (4, "sample=2,channel=2", "x", NETWORKS | FEATURES),
        (
            8,
            "channel=2,sample=2,height=2",
            "auto",
            {"classifier": None, "groups and norms": None, "cross entropy": None},
        ),
        (8, "channel=2,filter=2,width=2", "w", {"classifier": None, "residual block": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_networks_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, algorithm: str, networks: dict[str, Any]
) -> None:
    for rank, answer in enumerate(ranks(size).run(compare, list(networks), partition, algorithm)):
        assert not {name: found for name, found in answer.items() if not max(found.values()) < 1e-9}, f"rank {rank}"
