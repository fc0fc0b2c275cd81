from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives, refusals
from ranks import Ranks
from reference import Case, wrong
from torch import Tensor, nn

import distconv
from distconv.rules.normalization.rows import Over, Rows, normalized_backward

pytestmark = pytest.mark.gloo

CASES: dict[str, Case] = {
    "batch": (nn.BatchNorm2d, (3,), {}, (4, 3, 8, 6)),
    "batch, uneven": (nn.BatchNorm2d, (3,), {}, (5, 3, 9, 7)),
    "batch, three rows": (nn.BatchNorm2d, (2,), {}, (3, 2, 3, 3)),
    "batch, one sample": (nn.BatchNorm2d, (2,), {}, (1, 2, 5, 3)),
    "batch, not affine": (nn.BatchNorm2d, (2,), {"affine": False}, (3, 2, 5, 6)),
    "batch, momentum None": (nn.BatchNorm2d, (2,), {"momentum": None}, (3, 2, 5, 6)),
    "batch, no running statistics": (nn.BatchNorm2d, (2,), {"track_running_stats": False}, (3, 2, 5, 6)),
    "group": (nn.GroupNorm, (2, 4), {}, (3, 4, 9, 7)),
    "group, not affine": (nn.GroupNorm, (2, 6), {"affine": False}, (3, 6, 3, 3)),
    "one group": (nn.GroupNorm, (1, 4), {}, (2, 4, 5, 6)),
    "instance": (nn.InstanceNorm2d, (3,), {}, (3, 3, 9, 7)),
    "instance, affine": (nn.InstanceNorm2d, (3,), {"affine": True}, (3, 3, 3, 3)),
    "instance, running statistics": (
        nn.InstanceNorm2d,
        (3,),
        {"affine": True, "track_running_stats": True},
        (3, 3, 5, 6),
    ),
    "layer over space": (nn.LayerNorm, ((9, 7),), {}, (3, 2, 9, 7)),
    "layer over everything": (nn.LayerNorm, ((2, 5, 6),), {}, (3, 2, 5, 6)),
    "layer over width": (nn.LayerNorm, (6,), {}, (3, 2, 5, 6)),
    "layer without weights": (nn.LayerNorm, ((3, 3),), {"elementwise_affine": False}, (3, 2, 3, 3)),
    "layer without bias": (nn.LayerNorm, ((2, 5, 6),), {"bias": False}, (3, 2, 5, 6)),
}
LINES: dict[str, Case] = {
    "batch 1-D": (nn.BatchNorm1d, (3,), {}, (3, 3, 9)),
    "group 1-D": (nn.GroupNorm, (3, 3), {}, (3, 3, 9)),
    "instance 1-D": (nn.InstanceNorm1d, (3,), {"affine": True, "track_running_stats": True}, (3, 3, 9)),
    "layer 1-D": (nn.LayerNorm, (9,), {}, (3, 2, 9)),
}
VOLUMES: dict[str, Case] = {
    "batch 3-D": (nn.BatchNorm3d, (2,), {}, (3, 2, 5, 4, 3)),
    "group 3-D": (nn.GroupNorm, (2, 4), {}, (3, 4, 5, 4, 3)),
    "instance 3-D": (nn.InstanceNorm3d, (2,), {"affine": True, "track_running_stats": True}, (3, 2, 5, 4, 3)),
    "layer 3-D": (nn.LayerNorm, ((4, 3),), {}, (3, 2, 5, 4, 3)),
}


class Shifted(nn.Module):
    """The norm of values that are not centred, with weights that are not 1; its running statistics in the output."""

    def __init__(self, kind: Callable[..., nn.Module], *arguments: Any, evaluate: bool, **keywords: Any) -> None:
        super().__init__()
        norm = kind(*arguments, **keywords)
        self.norm, self.offset = norm, nn.Parameter(torch.tensor(3.0))
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        if evaluate:
            for buffer in norm.buffers():
                if buffer.is_floating_point():
                    buffer.uniform_(0.5, 2.0)
            self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.offset)
        for name in ("running_mean", "running_var"):
            statistic = getattr(self.norm, name, None)
            if statistic is not None:
                y = y + statistic.clone().view(-1, *[1] * (y.dim() - 2))
        return y


def shifted(cases: dict[str, Case]) -> dict[str, Case]:
    """In training, and those with running statistics in evaluation too."""
    return {
        f"{name}{', evaluation' if evaluate else ''}": (
            Shifted,
            (kind, *arguments),
            {**keywords, "evaluate": evaluate},
            shape,
        )
        for name, (kind, arguments, keywords, shape) in cases.items()
        for evaluate in (False, True)
        if not evaluate or "running_mean" in kind(*arguments, **keywords).state_dict()
    }


@pytest.mark.parametrize(
    "size, runs",
    [
        (1, [("height=1", CASES)]),
        (2, [("sample=2", CASES), ("height=2", CASES), ("sample=2", LINES), ("channel=2", CASES)]),
        (3, [("width=3", CASES), ("depth=3", VOLUMES), ("channel=3", CASES)]),
        (
            4,
            [
                ("height=4", CASES),
                ("height=2,width=2", CASES),
                ("width=2,sample=2", CASES),
                ("sample=4", LINES),
                ("width=4", LINES),
                ("depth=2,width=2", VOLUMES),
                ("channel=2,height=2", CASES),
                ("channel=2,filter=2", CASES),
                ("sample=2,channel=2", LINES),
                ("channel=4", VOLUMES),
            ],
        ),
        (8, [("sample=2,depth=2,width=2", VOLUMES)]),
    ],
)
def test_norms_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, runs: list[tuple[str, dict[str, Case]]]
) -> None:
    tables = [(partition, shifted(cases)) for partition, cases in runs]
    for rank, found in enumerate(ranks(size).run(wrong, tables, 1e-10)):
        assert not found, f"rank {rank}"


def running() -> dict[str, Any]:
    """What batch norm leaves in its buffers, what it sends, and how it behaves elsewhere."""
    size = dist.get_world_size()
    mesh = distconv.init(f"height={size}", device_type="cpu")
    result: dict[str, Any] = {}
    torch.manual_seed(1)
    data = [torch.randn(3, 4, 7, 5, dtype=torch.float64) * 2 + 1e4 for _ in range(3)]
    for momentum in (0.1, None):
        plain = nn.BatchNorm2d(4, momentum=momentum).double()
        model = distconv.parallelize(copy.deepcopy(plain), mesh)
        for x in data:
            plain(x)
            model(distconv.shard(x, mesh))
        result[f"momentum {momentum}"] = all(
            type(a) is Tensor and torch.allclose(a, b, rtol=1e-10)
            for a, b in zip(model.buffers(), plain.buffers(), strict=True)
        )
        result[f"buffers {momentum}"] = [buffer.tolist() for buffer in model.buffers()]
    x = distconv.shard(data[0], mesh).detach().requires_grad_()
    with Collectives() as sent:
        nn.functional.batch_norm(x, None, None, training=True).backward(x.detach())
    result["one message per pass"] = len(sent.called) == 2 and all(
        word in name for word, name in zip(("gather", "reduce"), sent.called, strict=True)
    )
    with Collectives() as sent:
        nn.functional.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double()).backward(x.detach())
        nn.functional.layer_norm(x, [5]).backward(x.detach())
    result["no message where none is needed"] = sent.called == []
    messages = refusals(
        (
            lambda: nn.functional.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double()),
            lambda: torch.group_norm(x, 3),
            lambda: nn.functional.layer_norm(x, [7]),
        )
    )
    result["refused"] = "no error" not in messages
    for name, context in {"no_grad": torch.no_grad, "inference": torch.inference_mode}.items():
        with context():
            x = distconv.shard(data[0], mesh)
            for norm in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm((7, 5))):
                same = copy.deepcopy(norm).double()
                result[f"{name} {norm}"] = torch.allclose(distconv.gather(same(x)), copy.deepcopy(same)(data[0]))
    low = data[0].sub(1e4)
    for name, x in {"bfloat16": low.bfloat16(), "channels_last": low.to(memory_format=torch.channels_last)}.items():
        for norm in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm((7, 5))):
            same = norm.to(x.dtype)
            found = distconv.gather(same(distconv.shard(x, mesh)))
            result[f"{name} {norm}"] = found.dtype == x.dtype and torch.allclose(
                found.double(), same(x).double(), rtol=2e-2, atol=2e-2
            )
    mixed = nn.BatchNorm2d(4)
    found = distconv.gather(mixed(distconv.shard(low.bfloat16(), mesh)))
    result["float32 weights of bfloat16"] = torch.allclose(found, nn.BatchNorm2d(4)(low.bfloat16()), atol=2e-2)
    return result


def test_running_statistics_messages_and_modes(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(3).run(running)
    assert not [name for name, answer in answers[0].items() if not answer]
    assert answers[0] == answers[1] == answers[2]


class Assigning(nn.Module):
    """Batch norms of split channels, and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm2d(5), nn.BatchNorm2d(5), nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms(self.norms[0](x))
        self.calls = self.calls + self.norms[0].running_mean.numel()
        return y


def statistics_at_the_end() -> tuple[bool, int]:
    """Whether buffers are those of one process, and how many gathers a forward pass of four norms needs."""
    mesh = distconv.init("channel=2", device_type="cpu")
    torch.manual_seed(6)
    plain = Assigning().double()
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    whole = distconv.shard(x, mesh)
    for _ in range(2):
        plain(x)
        with Collectives() as sent:
            model(whole)
    pairs = zip(model.buffers(), plain.buffers(), strict=True)
    same = all(torch.allclose(a, b, rtol=1e-10) for a, b in pairs)
    return same, sum("gather" in name for name in sent.called)


def test_running_statistics_of_split_channels_are_gathered_together(ranks: Callable[[int], Ranks]) -> None:
    # Once before the first norm runs again, and once where its mean is read.
    assert ranks(2).run(statistics_at_the_end) == [(True, 2)] * 2


@pytest.mark.parametrize("shape", [(1, 2, 1, 7), (3, 2, 4, 1), (1, 3, 2, 2)])
def test_the_backward_is_right_of_all_strides(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    leaf = x.clone().requires_grad_()
    nn.functional.batch_norm(leaf, None, None, training=True).backward(grad)
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    orders = list(itertools.permutations(range(4)))
    how = Rows(1e-5, Over(None, x[:, 0].numel()))
    for of_grad, of_x in itertools.product(orders, repeat=2):
        own, rows = (
            t.permute(order).contiguous().permute(*map(order.index, range(4)))
            for t, order in ((grad, of_grad), (x, of_x))
        )
        dx, _, _ = normalized_backward(own, rows, None, mean, variance, how, True)
        torch.testing.assert_close(dx, leaf.grad, msg=f"{own.stride()}, {rows.stride()}")
