"""Sampling at the points of a grid, both sharded, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import differing, random
from small_tensors import gathered_up_to
from torch import Tensor

import distconv
from distconv.transfer.exchange import Exchanges

pytestmark = pytest.mark.gloo

Operator = Callable[[Tensor], Any]


def grid_of(x: Tensor) -> Tensor:
    """Points inside and outside of the map, made from the map itself: its gradient comes through both."""
    moved = torch.stack([x[:, 0], x[:, -1], x[:, 0] + x[:, -1]][: x.dim() - 2], -1)
    return moved * 0.9 + random(1, *x.shape[2:], x.dim() - 2, seed=8)


def at_elements(x: Tensor) -> Tensor:
    """Points that are elements, where gradients by positions jump: they come from the map itself, too."""
    moved = grid_of(x)
    identity = F.affine_grid(torch.eye(x.dim() - 1)[None, :-1].to(x.dtype), [1, 1, *x.shape[2:]], align_corners=True)
    return identity + (moved - moved.detach())


def no_numbers(x: Tensor, mode: str, padding: str) -> Tensor:
    """Maps at points of which some coordinates are infinite or no number; of these torch's backward of maps in 2-D may
    end the process."""
    grid = random(x.shape[0], *(4,) * (x.dim() - 2), x.dim() - 2, seed=8)
    for k, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        grid[:, 0, k, 0] = grid[:, k, 1, -1] = value
    grid[:, 3, 2] = torch.nan
    return F.grid_sample(x.detach() if x.dim() == 4 else x, grid, mode, padding, False).nan_to_num(7)


SAMPLED: dict[str, Operator] = (
    {
        f"{mode}, {padding}, {align}": lambda x, mode=mode, padding=padding, align=align: F.grid_sample(  # type: ignore[misc]
            x, grid_of(x), mode, padding, align
        )
        for mode, padding, align in itertools.product(
            ("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True)
        )
    }
    | {
        f"no numbers, {mode}, {padding}": lambda x, mode=mode, padding=padding: no_numbers(x, mode, padding)  # type: ignore[misc]
        for mode, padding in itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection"))
    }
    | {
        "a plain grid": lambda x: F.grid_sample(
            x, random(x.shape[0], 3, *x.shape[3:], x.dim() - 2), align_corners=True
        ),
        "a plain map": lambda x: F.grid_sample(random(x.shape[0], 3, *(4,) * (x.dim() - 2)), grid_of(x)),
        "one element": lambda x: F.grid_sample(
            x[(slice(None), slice(None), *(slice(1),) * (x.dim() - 2))], grid_of(x), "bilinear", "reflection", True
        ),
        "elements": lambda x: F.grid_sample(x, at_elements(x), align_corners=True),
        "an affine grid": lambda x: F.grid_sample(
            x, F.affine_grid(random(x.shape[0], x.dim() - 2, x.dim() - 1), x.shape)
        ),
    }
)


def compare(partition: str, shape: tuple[int, ...], most: int = 0) -> dict[str, Any]:
    with gathered_up_to(most):
        return differing(SAMPLED, partition, shape)


@pytest.mark.parametrize(
    "partition, shape",
    [
        ("height=4", (2, 3, 5, 4)),
        ("height=2,width=2", (1, 2, 5, 3)),
        ("sample=2,channel=2", (3, 3, 4, 4)),
        ("depth=2,height=2", (2, 2, 3, 3, 4)),
        ("sample=4", (3, 2, 3, 3)),
        ("channel=4", (1, 1, 3, 3)),
    ],
)
def test_grid_sample(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for most in (0, 500):  # Bytes of shares that come together.
        for wrong in ranks(4).run(compare, partition, shape, most):
            assert not wrong


def shares(most: int) -> tuple[int, int, int]:
    """How many blocks come to this rank, the elements of the largest, and those of its own share; ``most``: bytes that
    are fetched at a time."""
    x = distconv.shard(random(1, 2, 30, 32), distconv.init("height=4", device_type="cpu"))
    grid = distconv.shard(random(1, 2, 30, 32), x.device_mesh).movedim(1, -1)
    fetched: list[int] = []
    fetch = Exchanges.fetch

    def counted(transfer: Exchanges, local: Tensor) -> Tensor:
        result = fetch(transfer, local)
        fetched.append(result.numel())
        return result

    with mock.patch.object(Exchanges, "fetch", counted), gathered_up_to(most):
        F.grid_sample(x, grid, align_corners=False)
    return len(fetched), max(fetched), 2 * 8 * 32


def test_no_rank_has_the_whole_map(ranks: Callable[[int], Ranks]) -> None:
    for blocks, largest, share in ranks(4).run(shares, 0):
        assert blocks == 4 and largest == share


def test_small_shares_come_together(ranks: Callable[[int], Ranks]) -> None:
    for blocks, largest, share in ranks(4).run(shares, 2 * 2 * 8 * 32 * 8):  # in float64
        assert blocks == 2 and largest == 2 * share


def sampled_points() -> tuple[int, int, bool]:
    """How many points this rank's kernels sample, how many it has, and whether gradients are those of one process."""
    mesh, x = distconv.init("height=4", device_type="cpu"), random(2, 3, 32, 8)
    identity = F.affine_grid(torch.eye(3)[None, :-1].to(x.dtype).expand(2, -1, -1), list(x.shape), align_corners=False)
    grid = identity + 0.03 * random(*identity.shape, seed=1)  # up to two rows away
    found, counts = [], []
    derivative = torch.ops.aten.grid_sampler_2d_backward

    def counted(grad: Tensor, values: Tensor, points: Tensor, *args: Any) -> Any:
        counts.append(points.shape[0] * points.shape[-2])
        return derivative(grad, values, points, *args)

    for plain in (True, False):
        a, b = (each.clone().requires_grad_() for each in (x, grid))
        given = a if plain else distconv.shard(a, mesh)
        moved = b if plain else distconv.shard(b.movedim(-1, 1), mesh).movedim(1, -1)
        with gathered_up_to(0), mock.patch.object(torch.ops.aten, "grid_sampler_2d_backward", counted):
            y = F.grid_sample(given, moved, align_corners=False)
            (y if plain else distconv.gather(y)).square().sum().backward()
        found.append((a.grad, b.grad))
    right = all(torch.allclose(p, q, rtol=1e-12, atol=1e-12) for p, q in zip(*found, strict=True))
    return sum(counts), 2 * 8 * 8, right


def test_points_are_sampled_where_they_read(ranks: Callable[[int], Ranks]) -> None:
    for sampled, own, right in ranks(4).run(sampled_points):
        assert right
        assert own <= sampled < 2 * own  # of four pieces of the map


def test_bicubic_of_large_maps_is_refused(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4).run(bicubic)
    assert all(answer == answers[0] and "bicubic" in answer for answer in answers)


def bicubic() -> str:
    x = distconv.shard(random(1, 2, 8, 8), distconv.init("height=4", device_type="cpu"))
    with gathered_up_to(0), pytest.raises(distconv.UnsupportedOperation) as refusal:
        F.grid_sample(x, random(1, 3, 3, 2), "bicubic", align_corners=False)
    return str(refusal.value)
