from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reference import Case, wrong
from torch import Tensor, nn

import distconv
from distconv.transfer import group_calls

pytestmark = pytest.mark.gloo

CASES: dict[str, Case] = {
    "max 2": (nn.MaxPool2d, (2,), {}, (2, 3, 8, 8)),
    "max 2, odd": (nn.MaxPool2d, (2,), {}, (3, 2, 9, 11)),
    "max 3, stride 2, padding 1": (nn.MaxPool2d, (3, 2, 1), {}, (2, 2, 11, 9)),
    "max 3, stride 1": (nn.MaxPool2d, (3, 1, 1), {}, (1, 2, 9, 7)),
    "max 7 of 8": (nn.MaxPool2d, (7, 1, 3), {}, (1, 2, 8, 8)),
    "max 2, stride 3": (nn.MaxPool2d, (2, 3), {}, (2, 2, 10, 11)),
    "max, dilation": (nn.MaxPool2d, (3, 2, 1, 3), {}, (2, 2, 17, 12)),
    "max, ceil": (nn.MaxPool2d, (3, 2, 1), {"ceil_mode": True}, (2, 2, 10, 8)),
    "max, ceil, stride 4": (nn.MaxPool2d, (2, 4), {"ceil_mode": True}, (2, 2, 9, 13)),
    "max, per dim": (nn.MaxPool2d, ((3, 2), (1, 2), (0, 1)), {}, (2, 2, 7, 9)),
    "max, three rows": (nn.MaxPool2d, (3, 1, 1), {}, (2, 2, 3, 3)),
    "max to one": (nn.MaxPool2d, (7,), {}, (2, 2, 7, 7)),
    "average 2": (nn.AvgPool2d, (2,), {}, (2, 3, 8, 8)),
    "average 2, odd": (nn.AvgPool2d, (2,), {}, (3, 2, 9, 11)),
    "average 3, stride 2": (nn.AvgPool2d, (3, 2, 1), {}, (2, 2, 11, 9)),
    "average without the padding": (nn.AvgPool2d, (3, 2, 1), {"count_include_pad": False}, (2, 2, 11, 9)),
    "average, ceil": (nn.AvgPool2d, (3, 2, 1), {"ceil_mode": True}, (2, 2, 10, 8)),
    "average, ceil, no padding": (
        nn.AvgPool2d,
        (4, 3, 2),
        {"ceil_mode": True, "count_include_pad": False},
        (2, 2, 9, 8),
    ),
    "average, divisor": (nn.AvgPool2d, (3, 1, 1), {"divisor_override": 5}, (2, 2, 9, 7)),
    "average, three rows": (nn.AvgPool2d, (3, 1, 1), {"count_include_pad": False}, (1, 2, 3, 3)),
    "average to one": (nn.AvgPool2d, (7,), {}, (2, 2, 7, 7)),
    "max of everything": (nn.MaxPool2d, ((7, 5),), {}, (3, 2, 7, 5)),
    "average of everything": (nn.AvgPool2d, ((7, 5), 1), {"ceil_mode": True}, (3, 2, 7, 5)),
    "norm of order 2": (nn.LPPool2d, (2, 3, 2), {}, (2, 2, 9, 9)),
    **{
        f"adaptive {name} {size} of {shape}": (kind, (size,), {}, (3, 2, *shape))
        for name, kind in (("average", nn.AdaptiveAvgPool2d), ("maximum", nn.AdaptiveMaxPool2d))
        for size, shape in [
            (1, (9, 7)),
            (2, (9, 7)),
            ((1, 3), (8, 8)),
            ((3, 1), (3, 5)),
            (7, (5, 9)),
            ((5, None), (9, 4)),
            (4, (8, 8)),
            (1, (3, 3)),
        ]
    },
}
LINES: dict[str, Case] = {
    "max 1-D": (nn.MaxPool1d, (3, 2, 1), {}, (2, 2, 13)),
    "max 1-D, dilation": (nn.MaxPool1d, (3, 1, 1, 2), {"ceil_mode": True}, (2, 2, 13)),
    "average 1-D": (nn.AvgPool1d, (3, 2, 1), {"count_include_pad": False}, (2, 2, 13)),
    "adaptive average 1-D": (nn.AdaptiveAvgPool1d, (5,), {}, (2, 2, 13)),
    "adaptive average 1-D to one": (nn.AdaptiveAvgPool1d, (1,), {}, (2, 2, 13)),
    "adaptive maximum 1-D": (nn.AdaptiveMaxPool1d, (5,), {}, (2, 2, 13)),
}
VOLUMES: dict[str, Case] = {
    "max 3-D": (nn.MaxPool3d, (3, 2, 1), {}, (2, 2, 7, 6, 5)),
    "max 3-D, ceil": (nn.MaxPool3d, ((2, 1, 3), 2), {"ceil_mode": True}, (2, 2, 7, 6, 5)),
    "average 3-D": (nn.AvgPool3d, (3, 2, 1), {"count_include_pad": False, "ceil_mode": True}, (2, 2, 7, 6, 5)),
    "adaptive average 3-D": (nn.AdaptiveAvgPool3d, ((2, 1, 4),), {}, (2, 2, 7, 6, 5)),
    "adaptive average 3-D to one": (nn.AdaptiveAvgPool3d, (1,), {}, (2, 2, 7, 6, 5)),
    "adaptive maximum 3-D": (nn.AdaptiveMaxPool3d, ((2, 1, 4),), {}, (2, 2, 7, 6, 5)),
}


SOME = dict(list(CASES.items())[::3])


class Gained(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool, self.gain = pool, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) * self.gain


@pytest.mark.parametrize(
    "size, runs",
    [
        (1, [("height=1", CASES)]),
        (2, [("sample=2", SOME), ("height=2", CASES), ("width=2", LINES)]),
        (3, [("width=3", CASES), ("depth=3", VOLUMES)]),
        (
            4,
            [
                ("height=4", CASES),
                ("height=2,width=2", CASES),
                ("width=2,sample=2", SOME),
                ("width=4", LINES),
                ("depth=2,width=2", VOLUMES),
                ("sample=1,height=4", VOLUMES),
            ],
        ),
    ],
)
def test_pooling_equals_one_process(
    ranks: Callable[[int], Ranks], size: int, runs: list[tuple[str, dict[str, Case]]]
) -> None:
    for rank, found in enumerate(ranks(size).run(wrong, runs, 1e-12, Gained)):
        assert not found, f"rank {rank}"


def indices() -> dict[str, bool]:
    """Positions of the maxima, among many ties, and their gradients, are those of one process."""
    result = {}
    for partition in ("height=2,width=2", "width=4", "height=4", "sample=2,width=2"):
        mesh = distconv.init(partition, device_type="cpu")
        torch.manual_seed(3)
        base = torch.randint(0, 3, (2, 2, 9, 7)).double()
        base[0, 0, 0, 0] = -torch.inf
        base[1, 1, -3:] = -torch.inf
        for name, pool in {
            "window": nn.MaxPool2d(3, 2, 1, return_indices=True),
            "dilated": nn.MaxPool2d(2, 3, 1, 2, return_indices=True, ceil_mode=True),
            "adaptive": nn.AdaptiveMaxPool2d((4, 3), return_indices=True),
            "global": nn.AdaptiveMaxPool2d(1, return_indices=True),
        }.items():
            alone, here = base.clone().requires_grad_(), base.clone().requires_grad_()
            expected, places = pool(alone)
            found, where = pool(distconv.shard(here, mesh))
            found = distconv.gather(found)
            expected.backward(torch.ones_like(expected))
            found.backward(torch.ones_like(found))
            valid = expected > -torch.inf
            result[f"{partition}: {name}"] = bool(
                torch.equal(found, expected)
                and torch.equal(distconv.gather(where)[valid], places[valid])
                and torch.equal(alone.grad[alone > -torch.inf], here.grad[here > -torch.inf])
            )
    return result


def test_indices_mean_the_whole_input(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(4).run(indices):
        assert all(answer.values()), answer


def modes() -> dict[str, Any]:
    """Other dtypes and formats, without autograd and in inference mode; what moves; what is refused."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    base = torch.randn(2, 4, 9, 6)
    result: dict[str, Any] = {}
    for name, x in {
        "bfloat16": base.bfloat16(),
        "channels_last": base.to(memory_format=torch.channels_last),
    }.items():
        for pool in (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(5)):
            y, expected = pool(distconv.shard(x, mesh)), pool(x)
            same = torch.allclose(distconv.gather(y).float(), expected.float(), rtol=1e-2, atol=1e-2)
            result[f"{name} {pool}"] = same and y.dtype == expected.dtype
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            x = distconv.shard(base, mesh)
            line = distconv.shard(base[..., 0], distconv.init(f"width={dist.get_world_size()}", device_type="cpu"))
            for pool in (nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(3, 1, 1)):
                result[f"{context.__name__} {pool}"] = torch.allclose(distconv.gather(pool(x)), pool(base))
            for pool in (nn.MaxPool1d(3, 2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2)):
                same = torch.allclose(distconv.gather(pool(line)), pool(base[..., 0]))
                result[f"{context.__name__} {pool}"] = same
    # Sums of such numbers are exact in float32, and rounded to the 8 bits of bfloat16 once.
    half = torch.randint(-100, 100, (4, 8, 12, 12)).bfloat16()
    for size in (1, 2):
        outputs, grads = [], []
        for x in (half.clone().requires_grad_(), distconv.shard(half, mesh).detach().requires_grad_()):
            y = nn.functional.adaptive_avg_pool2d(x, size)
            (y * 3).sum().backward()
            outputs.append(y)
            grads.append(x.grad)
        for name, (expected, found) in (("mean", outputs), ("gradient", grads)):
            result[f"{name} in bfloat16, to {size}"] = torch.equal(distconv.gather(found), expected)
    integers = torch.randint(-9, 9, (1, 1, 9, 5))
    pool = nn.MaxPool2d(3, 2, 1)
    result["integers"] = torch.equal(distconv.gather(pool(distconv.shard(integers, mesh))), pool(integers))
    x = distconv.shard(torch.randn(2, 4, 8, 6), mesh).detach().requires_grad_()
    moved = []
    transport, group_calls.all_to_all_single = (
        group_calls.all_to_all_single,
        lambda *_, **__: moved.append("all_to_all"),
    )
    try:
        for pool in (nn.MaxPool2d(2), nn.AvgPool2d(2)):
            pool(x).sum().backward()
        for attempt in (nn.MaxPool2d(3, 1, 2), nn.MaxPool2d(20), nn.AvgPool2d(2, 0), nn.AdaptiveAvgPool2d(-1)):
            try:
                attempt(x)
            except RuntimeError:
                continue
            result[f"refused {attempt}"] = False
        with contextlib.suppress(RuntimeError):
            nn.AdaptiveAvgPool2d(2)(distconv.shard(base[:, :, :0], mesh))
            result["refused without rows"] = False
    finally:
        group_calls.all_to_all_single = transport
    result["nothing moved"] = not moved
    return result


def test_formats_modes_and_refusals(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(2).run(modes):
        assert all(answer.values()), answer
