from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import refusals
from ranks import Ranks
from reference import Case, wrong
from torch import nn

import distconv
from distconv.transfer import group_calls

CASES: dict[str, Case] = {
    f"stride {s} of {n}": (nn.Conv2d, (2, 3, 3), {"stride": s, "padding": 1}, (2, 2, n, n + 1))
    for s in (2, 3)
    for n in (33, 34, 36)
}
CASES |= {
    "k7 at 8 rows": (nn.Conv2d, (2, 2, 7), {"padding": 3}, (1, 2, 8, 8)),
    "k9 at 8 rows": (nn.Conv2d, (2, 2, 9), {"padding": 4}, (1, 2, 8, 8)),
    "dilation 8": (nn.Conv2d, (2, 2, 3), {"padding": 8, "dilation": 8}, (1, 2, 17, 17)),
    "three rows": (nn.Conv2d, (2, 2, 3), {"padding": 1}, (1, 2, 3, 3)),
    "one row": (nn.Conv2d, (2, 2, 3), {"padding": 1}, (1, 2, 1, 5)),
    "output smaller than ranks": (nn.Conv2d, (2, 2, 5), {}, (3, 2, 6, 6)),
    "even kernel": (nn.Conv2d, (2, 2, 4), {"padding": 1}, (2, 2, 9, 10)),
    "even kernel, stride 2": (nn.Conv2d, (2, 2, 2), {"stride": 2}, (2, 2, 9, 10)),
    "even kernel, stride 3": (nn.Conv2d, (2, 2, 4), {"stride": 3, "padding": 2}, (2, 2, 11, 10)),
    "same, odd": (nn.Conv2d, (2, 2, 5), {"padding": "same"}, (2, 2, 9, 10)),
    "same, even": (nn.Conv2d, (2, 2, 4), {"padding": "same"}, (2, 2, 9, 10)),
    "same, even, dilated": (nn.Conv2d, (2, 2, (2, 4)), {"padding": "same", "dilation": 3}, (2, 2, 9, 10)),
    "valid": (nn.Conv2d, (2, 2, 3), {"padding": "valid"}, (2, 2, 9, 10)),
    "over-padded": (nn.Conv2d, (2, 2, 3), {"padding": 5}, (2, 2, 6, 5)),
    "over-padded, strided": (nn.Conv2d, (2, 2, 2), {"padding": 5, "stride": 3}, (1, 2, 4, 5)),
    "per dim": (nn.Conv2d, (2, 3, (5, 2)), {"padding": (2, 0), "stride": (1, 2), "dilation": (1, 3)}, (2, 2, 13, 18)),
    "groups": (nn.Conv2d, (4, 6, 3), {"padding": 1, "groups": 2}, (2, 4, 9, 10)),
    "depthwise": (nn.Conv2d, (4, 8, 3), {"padding": 1, "groups": 4, "stride": 2}, (2, 4, 9, 10)),
    "no bias": (nn.Conv2d, (2, 3, 3), {"padding": 1, "bias": False}, (2, 2, 9, 10)),
    "1x1": (nn.Conv2d, (2, 3, 1), {}, (2, 2, 9, 10)),
    "1x1, stride 2": (nn.Conv2d, (2, 3, 1), {"stride": 2}, (2, 2, 9, 10)),
    "1x1, stride 5": (nn.Conv2d, (2, 3, 1), {"stride": 5}, (2, 2, 9, 10)),
    "three samples": (nn.Conv2d, (2, 3, 3), {"padding": 1}, (3, 2, 9, 10)),
    "one sample": (nn.Conv2d, (2, 3, 3), {"padding": 1}, (1, 2, 9, 10)),
    **{
        f"transposed k{k} s{s} p{p} op{o} d{d}": (
            nn.ConvTranspose2d,
            (3, 2, k),
            {"stride": s, "padding": p, "output_padding": o, "dilation": d},
            (2, 3, 5, 6),
        )
        for k, s, p, o, d in [
            (2, 2, 0, 0, 1),
            (3, 2, 1, 1, 1),
            (3, 1, 1, 0, 1),
            (1, 3, 0, 2, 1),
            (2, 4, 0, 3, 1),
            (5, 2, 3, 0, 2),
            (4, 3, 2, 2, 3),
            (3, 1, 0, 1, 2),
        ]
    },
    "transposed, groups": (nn.ConvTranspose2d, (4, 6, 3), {"stride": 2, "groups": 2}, (2, 4, 5, 3)),
    "transposed, wide, few rows": (nn.ConvTranspose2d, (2, 2, 7), {"stride": 1, "padding": 3}, (1, 2, 3, 3)),
}
CASES |= {
    f"padding mode {mode}": (nn.Conv2d, (2, 2, 5), {"padding": 2, "padding_mode": mode}, (2, 2, 7, 6))
    for mode in ("circular", "reflect", "replicate")
}

VOLUMES: dict[str, Case] = {
    "conv3d": (nn.Conv3d, (2, 3, 3), {"padding": 1, "stride": 2}, (2, 2, 7, 6, 5)),
    "conv3d, per dim": (nn.Conv3d, (2, 2, (2, 3, 1)), {"padding": (0, 2, 1), "dilation": (1, 2, 1)}, (1, 2, 7, 6, 5)),
    "transposed 3d": (nn.ConvTranspose3d, (2, 2, 2), {"stride": 2}, (2, 2, 3, 4, 5)),
}
LINES: dict[str, Case] = {
    "conv1d, same": (nn.Conv1d, (2, 3, 3), {"padding": 1}, (2, 2, 32)),
    "conv1d": (nn.Conv1d, (2, 3, 5), {"padding": 2, "stride": 3}, (2, 2, 31)),
    "transposed 1d": (nn.ConvTranspose1d, (2, 3, 4), {"stride": 3, "output_padding": 1}, (2, 2, 9)),
    "long kernel": (nn.Conv1d, (1, 1, 15), {"padding": 7, "groups": 1}, (1, 1, 8)),
}


@pytest.mark.parametrize(
    "size, partition, cases",
    [
        (1, "sample=1,height=1", CASES),
        (2, "height=2", CASES),
        (2, "sample=2", CASES),
        (3, "width=3", CASES),
        (4, "height=4", CASES),
        (4, "sample=2,height=2", CASES),
        (4, "width=2,height=2", CASES),
        (4, "height=1,width=4", CASES),
        (4, "depth=2,height=2", VOLUMES),
        (3, "depth=3", VOLUMES),
        (4, "width=2,sample=2", VOLUMES),
        (4, "width=4", LINES),
        (2, "sample=2", LINES),
        (2, "channel=2", CASES),
        (3, "channel=3", CASES),
        (4, "channel=2,filter=2", CASES),
        (4, "height=2,channel=2", CASES),
        (4, "channel=4", VOLUMES),
        (4, "filter=2,sample=2", LINES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_convolutions_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, cases: dict[str, Case]
) -> None:
    for rank, found in enumerate(ranks(size).run(wrong, [(partition, cases)], 1e-12)):
        assert not found, f"rank {rank}"


def wrong_in_turn(partition: str, cases: dict[str, Case], tolerance: float) -> tuple[Any, int]:
    """As ``wrong``, edges apart wherever that is possible, and how many convolutions that was."""
    from distconv.model.direct.shaped_layout import shaped_layout
    from distconv.rules.convolution import edges, overlap, plan

    def forget() -> None:
        plan.make_convolution_plan.cache_clear()
        shaped_layout.cache_clear()  # which keeps what calls have decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "MOST_EDGE", 1)
        for pays in ("overlap_pays", "is_large"):
            patch.setattr(plan, pays, lambda *_: True)
        taken: list[str] = []
        for name in ("forward", "backward"):
            stock = getattr(overlap, name)

            def counted(*args: Any, name: str = name, stock: Any = stock) -> Any:
                taken.append(name)
                return stock(*args)

            patch.setattr(overlap, name, counted)
        forget()
        try:
            return wrong([(partition, cases)], tolerance), min(map(taken.count, ("forward", "backward")))
        finally:
            forget()


@pytest.mark.parametrize(
    "size, partition, cases",
    [
        (2, "height=2", CASES),
        (3, "width=3", CASES),
        (4, "width=2,height=2", CASES),
        (4, "depth=2,height=2", VOLUMES),
        (4, "width=4", LINES),
        (4, "height=2,channel=2", CASES),
        (3, "channel=3", CASES),
        (4, "channel=2,filter=2", CASES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_edges_apart_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, cases: dict[str, Case]
) -> None:
    answers = ranks(size).run(wrong_in_turn, partition, cases, 1e-12)
    for rank, (found, _) in enumerate(answers):
        assert not found, f"rank {rank}"
    (count,) = {count for _, count in answers}  # all ranks do it, or none
    assert count or "channel" in partition  # whose channels travel instead


def on_the_last_ranks(cases: dict[str, Case]) -> dict[str, dict[str, float]] | None:
    world = dist.get_world_size()
    here = list(range(world - 2, world))
    if dist.get_rank() not in here:
        for _ in cases:
            distconv.init("height=2", ranks=here, device_type="cpu")
        return None
    return wrong([("height=2", cases)], 1e-12, ranks=here)


def test_a_mesh_that_does_not_start_at_rank_0(ranks: Callable[[int], Ranks]) -> None:
    names = ("stride 2 of 33", "transposed k3 s2 p1 op1 d1")
    answers = ranks(3).run(on_the_last_ranks, {name: CASES[name] for name in names})
    assert answers[0] is None
    assert answers[1] == answers[2] == {}


def formats() -> dict[str, list[bool]]:
    """For each kind of input: the values, the dtype and the memory format of the result are those of one process."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    base = torch.randn(2, 4, 9, 6)
    conv = nn.Conv2d(4, 3, 3, padding=1)
    result = {}
    for name, x, kernel in [
        ("channels_last", base.to(memory_format=torch.channels_last), conv),
        ("strided", torch.randn(2, 9, 4, 12).transpose(1, 2)[..., ::2], conv),
        ("bfloat16", base.bfloat16(), copy.deepcopy(conv).bfloat16()),
        ("unbatched", base[0], conv),
    ]:
        expected = kernel(x)
        y = nn.functional.conv2d(
            distconv.shard(x if x.dim() == 4 else x[None], mesh), kernel.weight, kernel.bias, padding=1
        )
        full = distconv.gather(y if x.dim() == 4 else y[0])
        last = torch.channels_last
        local = y.to_local()
        same = x.dim() < 4 or local.is_contiguous(memory_format=last) == expected.is_contiguous(memory_format=last)
        close = torch.allclose(
            full.float(), expected.float(), rtol=1e-2 if x.dtype is torch.bfloat16 else 1e-5, atol=1e-5
        )
        result[name] = [close, full.dtype == expected.dtype, same]
    return result


def test_memory_formats_and_precisions(ranks: Callable[[int], Ranks]) -> None:
    for answer in ranks(2).run(formats):
        assert all(all(checks) for checks in answer.values()), answer


def traffic() -> tuple[list[int], list[int]]:
    """Bytes received by this rank in forward and in backward of conv2d 32x512x512, k3."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    conv = distconv.parallelize(nn.Conv2d(32, 32, 3, padding=1), mesh)
    moved: list[int] = []
    transport = group_calls.all_to_all_single

    def counting(output: torch.Tensor, input: torch.Tensor, *rest: Any, **options: Any) -> Any:
        moved.append(output.nbytes + input.nbytes)
        return transport(output, input, *rest, **options)

    group_calls.all_to_all_single = counting
    try:
        x = distconv.shard(torch.randn(1, 32, 512, 512), mesh)
        y = conv(x.detach().requires_grad_())
        forward = list(moved)
        moved.clear()
        y.sum().backward()
        backward = list(moved)
        moved.clear()
        pointwise = distconv.parallelize(nn.Conv2d(32, 4, 1), mesh)
        pointwise(x.detach().requires_grad_()).sum().backward()
        assert moved == []
    finally:
        group_calls.all_to_all_single = transport
    return forward, backward


def test_a_step_moves_one_halo_each_way_and_pass(ranks: Callable[[int], Ranks]) -> None:
    halo = 32 * 512 * 4
    assert ranks(2).run(traffic) == [([2 * halo], [2 * halo])] * 2


def refused() -> list[str]:
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    x = distconv.shard(torch.randn(2, 4, 8, 8), mesh)
    return refusals(
        (
            lambda: nn.functional.conv2d(x, torch.randn(4, 3, 3, 3)),
            lambda: nn.functional.conv2d(x, torch.randn(4, 4, 9, 9)),
            lambda: distconv.init("width=9", device_type="cpu"),
            lambda: distconv.shard(torch.randn(2, 4, 8), mesh),
        )
    )


def test_refusals_are_the_same_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    for message, words in zip(
        first,
        [
            "convolution of an input (2, 4, 8, 8) with a weight (4, 3, 3, 3), groups 1: ",
            "convolution of an input (2, 4, 8, 8) with a weight (4, 4, 9, 9), groups 1: ",
            "partition 'width=9' needs 9 ranks, but 2 are running",
            "partition axis height=2: 1-D data (N, C, 1 spatial dims) has no height; accepted: sample, channel, ",
        ],
        strict=True,
    ):
        assert words in message and message != "no error", first
