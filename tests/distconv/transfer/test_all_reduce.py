"""The allreduce of what collectives do not know, or know as something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distconv.transfer import group_calls
from distconv.transfer.collectives import MAX, MIN, PRODUCT, SUM, all_reduced

RANKS = 256


@pytest.mark.parametrize("op, expected", [(SUM, torch.any), (PRODUCT, torch.all), (MAX, torch.any), (MIN, torch.all)])
def test_booleans_of_256_ranks(monkeypatch: pytest.MonkeyPatch, op: Any, expected: Any) -> None:
    """As of one process: a sum is true where one is. Bytes, as which they are sent, are added modulo 256."""
    reduced = {SUM: torch.sum, PRODUCT: torch.prod, MAX: torch.amax, MIN: torch.amin}
    of_ranks = torch.stack([torch.ones(RANKS), torch.zeros(RANKS), torch.arange(RANKS) == 7], 1).bool()

    def stand_in(x: Tensor, op: Any, group: Any) -> Any:
        assert torch.equal(x.bool(), of_ranks[0]), "this is rank 0"
        everyone = of_ranks.to(x.dtype)
        kind = {"dtype": x.dtype} if op in (SUM, PRODUCT) else {}
        x.copy_(reduced[op](everyone, 0, **kind))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(group_calls, "all_reduce", stand_in)
    found = all_reduced(of_ranks[0].clone(), None, op)
    assert found.dtype == torch.bool
    assert torch.equal(found, expected(of_ranks, 0))


def test_the_sum_of_bytes_wraps() -> None:
    """So that the test above can fail."""
    assert torch.ones(RANKS, dtype=torch.uint8).sum(0, dtype=torch.uint8) == 0
