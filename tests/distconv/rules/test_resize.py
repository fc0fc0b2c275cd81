from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import Ranks
from reference import Case, errors, wrong
from torch import Tensor, nn

import distconv
from distconv.rules.resize.taps import linear_taps, nearest_taps
from distconv.tensors.gathering.record import model_call
from distconv.transfer import group_calls

pytestmark = pytest.mark.gloo


class Resized(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.upsample, self.gain = nn.Upsample(**keywords), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.upsample(x) * self.gain


KEPT = "by 1.1, both x the same"
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "twice": ({"scale_factor": 2}, (2, 2, 8, 6)),
    "twice, uneven": ({"scale_factor": 2}, (3, 2, 9, 7)),
    "twice, three rows": ({"scale_factor": 2}, (1, 2, 3, 3)),
    "three times": ({"scale_factor": 3}, (1, 2, 8, 4)),
    "half": ({"scale_factor": 0.5}, (2, 2, 8, 9)),
    "by 1.7": ({"scale_factor": 1.7}, (2, 2, 9, 7)),
    "by 2.2": ({"scale_factor": (2.2, 0.6)}, (2, 2, 6, 7)),
    "by 1.7, recomputed": ({"scale_factor": 1.7, "recompute_scale_factor": True}, (2, 2, 9, 7)),
    "to 13 x 5": ({"size": (13, 5)}, (2, 2, 9, 7)),
    "to one": ({"size": 1}, (2, 2, 5, 4)),
    "from one": ({"size": (9, 4)}, (2, 2, 1, 1)),
    "same": ({"size": (9, 7)}, (2, 2, 9, 7)),
    "by 1.25, x the same": ({"scale_factor": 1.25}, (2, 2, 2, 5)),
    "by 1.1, x to more": ({"scale_factor": (1.1, 1.7)}, (2, 2, 7, 6)),
    "by 1.1, y to more": ({"scale_factor": (1.7, 1.1)}, (2, 2, 7, 6)),
    KEPT: ({"scale_factor": 1.1}, (2, 2, 7, 6)),
}
CASES: dict[str, Case] = {
    f"{mode}{' aligned' if align else ''} {name}": (
        Resized,
        (),
        {"mode": mode, **keywords, **({} if align is None else {"align_corners": align})},
        shape,
    )
    for mode, align in [
        ("nearest", None),
        ("nearest-exact", None),
        ("bilinear", False),
        ("bilinear", True),
        ("bicubic", False),
        ("bicubic", True),
    ]
    for name, (keywords, shape) in SIZES.items()
    if (mode, name) != ("bicubic", KEPT)
    if align is None or (mode == "bilinear" and not align) or ("x" in name or "one" in name or "twice, " in name)
}
SOME = dict(list(CASES.items())[::4])
LINES: dict[str, Case] = {
    f"{mode} {name}": (Resized, (), {"mode": mode, **keywords}, shape)
    for mode in ("nearest", "nearest-exact", "linear")
    for name, keywords, shape in [
        ("twice", {"scale_factor": 2}, (2, 2, 9)),
        ("to 29", {"size": 29}, (3, 2, 11)),
        ("by 0.7", {"scale_factor": 0.7}, (2, 2, 11)),
    ]
}
VOLUMES: dict[str, Case] = {
    f"{mode} {name}": (Resized, (), {"mode": mode, **keywords}, shape)
    for mode in ("nearest", "nearest-exact", "trilinear")
    for name, keywords, shape in [
        ("twice", {"scale_factor": 2}, (2, 2, 4, 3, 6)),
        ("to 9 x 5 x 7", {"size": (9, 5, 7)}, (2, 2, 5, 4, 3)),
    ]
}
VOLUMES["trilinear aligned"] = (
    Resized,
    (),
    {"mode": "trilinear", "scale_factor": 2, "align_corners": True},
    (2, 2, 5, 4, 3),
)


class Context(nn.Module):
    """What is pooled to one pixel, and resized, meets the image again."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.conv, self.bottleneck = mode, nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        context = nn.functional.relu(self.bottleneck(pooled))
        wide = nn.functional.interpolate(context, size=x.shape[-2:], mode=self.mode)
        return torch.cat([x, wide], 1) * (
            1 + nn.functional.interpolate(pooled, size=x.shape[-2:], mode=self.mode)[:, :1]
        )


def context(partitions: list[str]) -> dict[str, dict[str, float]]:
    return {
        f"{partition} {mode}": errors(lambda m=mode: Context(m), [(2, 2, 9, 7)], partition)
        for partition in partitions
        for mode in ("nearest", "bilinear")
    }


def test_a_pooled_context_meets_the_image(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(4).run(context, ["height=4", "height=2,width=2", "sample=2,width=2"]):
        assert not {name: found for name, found in answer.items() if not max(found.values()) < 1e-11}


@pytest.mark.parametrize(
    "size, runs",
    [
        (1, [("height=1", CASES)]),
        (2, [("sample=2", SOME), ("height=2", SOME), ("width=2", LINES)]),
        (3, [("width=3", SOME), ("depth=3", VOLUMES)]),
        (
            4,
            [
                ("height=4", CASES),
                ("height=2,width=2", SOME),
                ("width=2,sample=2", SOME),
                ("width=4", LINES),
                ("depth=2,width=2", VOLUMES),
            ],
        ),
    ],
)
def test_resize_equals_one_process(
    ranks: Callable[[int], Ranks], size: int, runs: list[tuple[str, dict[str, Case]]]
) -> None:
    for rank, found in enumerate(ranks(size).run(wrong, runs, 1e-12)):
        assert not found, f"rank {rank}"


def modes() -> dict[str, bool]:
    """Other dtypes and formats, inference mode, exactness of the positions; what moves; what is refused."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    result: dict[str, bool] = {}
    base = torch.randn(2, 4, 55, 6)
    for name, x in {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "channels_last": base.to(memory_format=torch.channels_last),
    }.items():
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            for keywords in ({"scale_factor": 2.2}, {"size": (96, 7)}, {"scale_factor": 2}):
                y = nn.functional.interpolate(distconv.shard(x, mesh), mode=mode, **keywords)
                expected = nn.functional.interpolate(x, mode=mode, **keywords)
                found = distconv.gather(y)
                wide = 2e-2 if x.dtype is torch.bfloat16 else 2e-5
                same = torch.equal if "nearest" in mode else lambda a, b, t=wide: torch.allclose(a, b, rtol=t, atol=t)
                result[f"{name} {mode} {keywords}"] = found.dtype == expected.dtype and same(found, expected)
    with torch.inference_mode():
        for mode in ("nearest", "bilinear"):
            y = nn.functional.interpolate(distconv.shard(base, mesh), scale_factor=2, mode=mode)
            expected = nn.functional.interpolate(base, scale_factor=2, mode=mode)
            result[f"inference {mode}"] = torch.allclose(distconv.gather(y), expected, atol=1e-6)
    samples = distconv.init(f"sample={dist.get_world_size()}", device_type="cpu")
    alone, here = (base.clone().requires_grad_() for _ in range(2))
    expected = nn.functional.interpolate(alone, size=(20, 5), mode="bilinear", antialias=True)
    y = nn.functional.interpolate(distconv.shard(here, samples), size=(20, 5), mode="bilinear", antialias=True)
    expected.sum().backward()
    distconv.gather(y).sum().backward()
    result["antialias of whole images"] = torch.allclose(distconv.gather(y), expected) and torch.allclose(
        here.grad, alone.grad
    )
    moved: list[int] = []
    transport, group_calls.all_to_all_single = group_calls.all_to_all_single, lambda *_, **__: moved.append(1)
    try:
        x = distconv.shard(torch.randn(2, 4, 8, 6), mesh).detach().requires_grad_()
        y = nn.functional.interpolate(x, scale_factor=2)
        y.backward(torch.ones_like(y))
        for name, attempt in {
            "integers": lambda: torch.ops.aten.upsample_nearest2d(distconv.shard(x.detach().long(), mesh), [9, 9]),
            "bicubic that keeps both": lambda: nn.functional.interpolate(x, scale_factor=1.01, mode="bicubic"),
            "size 0": lambda: nn.functional.interpolate(x, size=(0, 4)),
        }.items():
            try:
                with model_call():
                    attempt()
                result[f"refused {name}"] = False
            except RuntimeError:
                continue
    finally:
        group_calls.all_to_all_single = transport
    result["nothing moved"] = not moved
    return result


def test_formats_modes_and_refusals(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(2).run(modes):
        assert not [name for name, right in answer.items() if not right]


@example("linear", 2, 1, 1.25)
@given(
    st.sampled_from(["nearest", "nearest-exact", "linear", "linear aligned", "cubic", "cubic aligned"]),
    st.integers(1, 60),
    st.integers(1, 90),
    st.none() | st.floats(0.3, 3.0),
)
def test_taps_are_those_of_torch(mode: str, extent: int, outputs: int, scale: float | None) -> None:
    if scale is not None:
        outputs = max(1, int(extent * scale))
    aten, align = torch.ops.aten, "aligned" in mode
    x = torch.randn(1, 1, extent, 1, dtype=torch.float64)
    if "nearest" in mode:
        name = "upsample_nearest2d" if mode == "nearest" else "_upsample_nearest_exact2d"
        expected = getattr(aten, name)(x, [outputs, 1], scale, None)
        taps = nearest_taps(name, 0, extent, outputs, scale, x, False)
    else:
        operator = aten.upsample_bicubic2d if "cubic" in mode else aten.upsample_bilinear2d
        expected = operator(x, [outputs, 1], align, scale, None)
        taps = linear_taps(extent, outputs, scale, align, "cubic" in mode, torch.float64)
    found = (x.flatten()[torch.from_numpy(taps.index)] * torch.from_numpy(taps.weight)).sum(0)
    torch.testing.assert_close(found, expected.flatten(), rtol=1e-12, atol=1e-12)
    y = torch.randn(outputs, dtype=torch.float64)
    back = taps.transposed(extent)
    adjoint = (y[torch.from_numpy(back.index)] * torch.from_numpy(back.weight)).sum(0)
    torch.testing.assert_close((found * y).sum(), (x.flatten() * adjoint).sum(), rtol=1e-11, atol=1e-11)
