"""Windows as dims of their own, of sharded maps of whatever size, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import differing, random
from small_tensors import gathered_up_to
from torch import Tensor

pytestmark = pytest.mark.gloo

UNFOLDED: dict[str, Callable[[Tensor], Any]] = {
    "windows of rows": lambda x: x.unfold(2, 3, 1),
    "windows apart": lambda x: x.unfold(-1, 2, 3) * 2,
    "windows of both": lambda x: x.unfold(2, 2, 2).unfold(3, 3, 2).sum((-1, -2)),
    "copies": lambda x: torch.unfold_copy(x, 2, 2, 1),
    "patches": lambda x: F.unfold(x, 2),
    "patches, strided": lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1)),
    "patches of no sample": lambda x: F.unfold(x[:0], 2),
    "patches of one sample": lambda x: F.unfold(x[0], 3, padding=1),
    "added patches": lambda x: F.fold(F.unfold(x, 2, padding=1), x.shape[2:], 2, padding=1),
    "added plain patches": lambda x: x + F.fold(random(x.shape[0], 4 * x.shape[1], x.shape[2] * x.shape[3]), (
        x.shape[2] + 1, x.shape[3] + 1), 2)[:, :, 1:, 1:],
}  # fmt: skip


def compare(partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    with gathered_up_to(0):
        return differing(UNFOLDED, partition, shape)


@pytest.mark.parametrize(
    "partition, shape", [("height=4", (2, 3, 5, 6)), ("height=2,width=2", (2, 2, 5, 7)), ("channel=4", (2, 3, 5, 6))]
)
def test_windows(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for wrong in ranks(4).run(compare, partition, shape):
        assert not wrong
