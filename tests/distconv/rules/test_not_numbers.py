"""What is not a number (NaN) on any rank: the largest and smallest elements are not numbers either, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import distconv

pytestmark = pytest.mark.gloo

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: torch.amax(x, (2, 3)),
    "smallest, kept": lambda x: torch.amin(x, 2, keepdim=True),
    "largest of all": lambda x: x.max(),
    "smallest of all": lambda x: x.min(),
    "both": lambda x: torch.stack(torch.aminmax(x, dim=2)),
    "largest of half numbers": lambda x: torch.amax(x.bfloat16(), (1, 2)),
    "largest size": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=2),
    "norm of many": lambda x: torch.stack([y + 0 for y in torch._foreach_norm([x, x * 2], float("inf"))]),
}


def lost() -> list[str]:
    """The functions whose results differ from those of one process, by the row that is not a number."""
    mesh = distconv.init("height=2", device_type="cpu")
    wrong = []
    for row in (0, 6):
        x = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x[0, 1, row, 2] = torch.nan
        x[1, 2, row, 0] = -torch.inf
        for name, function in FUNCTIONS.items():
            found = distconv.gather(function(distconv.shard(x, mesh)))
            if not torch.equal(found.nan_to_num(777.0), function(x).nan_to_num(777.0)):
                wrong.append(f"{name}, row {row}")
    return wrong


def test_extremes_keep_what_is_not_a_number(ranks: Callable[[int], Ranks]) -> None:
    for wrong in ranks(2).run(lost):
        assert not wrong
