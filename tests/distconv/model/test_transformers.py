"""Blocks of vision transformers against one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from reference import errors
from torch import Tensor, nn
from vision_blocks import BLOCKS

import distconv

pytestmark = pytest.mark.gloo


def compare(partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """{block: its errors} of those that differ from one process."""
    wrong: dict[str, Any] = {}
    for name, build in BLOCKS.items():
        try:
            found = errors(lambda build=build: build(*shape[1:]), [shape], partition)  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"in block {name!r} on {partition}")
            raise
        if not max(found.values()) < 1e-10:
            wrong[name] = found
    return wrong


PARTITIONS = [
    (4, "height=2,width=2", (2, 8, 8, 8)),
    (4, "height=4", (1, 8, 8, 6)),
    (4, "channel=4", (2, 8, 8, 4)),
    (4, "sample=2,channel=2", (3, 8, 4, 8)),
]


@pytest.mark.parametrize("size, partition, shape", PARTITIONS, ids=[partition for _, partition, _ in PARTITIONS])
def test_blocks_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, shape: tuple[int, ...]
) -> None:
    for rank, wrong in enumerate(ranks(size).run(compare, partition, shape)):
        assert not wrong, f"rank {rank}"


class Encoder(nn.TransformerEncoderLayer):
    """Between the positions of a map (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.flatten(2).mT).mT.view(x.shape)


def evaluated(partition: str, mode: Callable[[], Any]) -> float:
    """The error of a layer that torch computes by one operator of its own in evaluation without gradients."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(6)
    plain = Encoder(8, 2, 16, batch_first=True).double().eval()
    x = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    with mode():
        return float((distconv.gather(model(x)) - plain(x)).abs().max())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_in_evaluation_equals_one_process(ranks: Callable[[int], Ranks], mode: Callable[[], Any]) -> None:
    for partition in ("height=4", "sample=2,channel=2"):
        assert max(ranks(4).run(evaluated, partition, mode)) < 1e-12, partition
