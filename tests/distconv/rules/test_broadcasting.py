"""Dims of extent 1 beside longer ones, and dims that come and go, where they are sharded: against one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from reference import differing, errors, random
from small_tensors import gathered_up_to
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo

Operator = Callable[[Tensor], Any]


def excited(x: Tensor) -> Tensor:
    """A squeeze-excite block on maps of one element."""
    y = x[:, :, :1, :1]
    inner = F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), random(2, y.shape[1], 1, 1)))
    return y * F.conv2d(inner, random(y.shape[1], 2, 1, 1)).sigmoid()


def bits(x: Tensor) -> Tensor:
    return (x.detach() * 4).long()


BROADCAST: dict[str, Operator] = {
    "gate of one channel": lambda x: x * F.conv2d(x, random(1, x.shape[1], 1, 1)).sigmoid(),
    "gate of one element": lambda x: x * F.conv2d(x, random(x.shape[1], *x.shape[1:])).sigmoid(),
    "single of every dim": lambda x: x[:1] * x[:, :1] + x[:, :, :1] * x[..., :1],
    "in place": lambda x: (x * 1).add_(x[:, :, :1]).mul_(x[..., :1]),
    "where": lambda x: torch.where(x[:, :, :1] > 0, x, x[:, :1]).clamp(x[:, :, :1] - 1, x[..., :1].abs()),
    "binary": lambda x: torch.fmin(x, x[:, :, 1:2]) + torch.logaddexp(x, x[:, :1]) + torch.hypot(x[:1], x[..., :1]),
    "shifted bits": lambda x: (
        bits(x) >> 1,
        bits(x) << 2,
        bits(x) ^ 3,
        bits(x) >> bits(x).abs() % 3,
        1 << bits(x).abs(),
    ),
    "types of results": lambda x: (
        bits(x).byte().any(2),
        bits(x).byte().all(),
        x.detach().cumsum(2, dtype=torch.int16),
    ),
    "spread of complex numbers": lambda x: (torch.complex(x, x.flip(2)).std(), torch.complex(x, x.flip(2)).var(2)),
    "integral": lambda x: torch.floor_divide(x.detach(), 0.5) + torch.remainder(x, x[:, :, :1].detach().abs() + 1),
    "ternary": lambda x: torch.lerp(x[:, :, :1], x, x[..., :1]) + torch.addcmul(x[:1], x[:, :1], x),
    "gaussian": lambda x: F.gaussian_nll_loss(x, random(*x.shape), x[:, :, :1].abs() + 0.1),
    "log-sigmoid": lambda x: F.logsigmoid(x) + torch.rsub(x, x[:, :1]),
    "other dims": lambda x: x.transpose(2, 3)[:, :, :2, :2] + x[:, :, :2, :2],
    "expanded": lambda x: x[:, :, :1].expand(*x.shape) + x[:, :1].expand_as(x) + x[:1].broadcast_to(x.shape),
    "expanded, a dim more": lambda x: x[..., :1].expand(3, -1, -1, -1, 2),
    "cosine similarity": lambda x: F.cosine_similarity(x, x[:, :, :1], 1),
    "squeeze and excite": excited,
    "response norm of one channel": lambda x: F.local_response_norm(F.conv2d(x, random(1, x.shape[1], 1, 1)), 2),
    "gated linear unit": lambda x: F.glu(torch.cat([x, x], 1), 1) + F.glu(torch.cat([x, x], 2), 2),
}


def without_samples(x: Tensor) -> list[Tensor]:
    y = x[:0]
    return [F.interpolate(y, (3, 4), mode="bilinear"), y.repeat(1, 4, 1, 1), y.max(2)[0], *y.split(2, 0)]


def least_and_greatest(x: Tensor) -> list[Tensor]:
    """Of all, and of a row; torch 2.11 has no derivative of them."""
    derivative = torch.ones(1, requires_grad=True).aminmax()[0].grad_fn.name()
    x = x.detach() if "NotImplemented" in derivative else x
    return [*torch.aminmax(x), *torch.aminmax(x[:, :, :1])]


DIMS: dict[str, Operator] = {
    "squeezed": lambda x: [x[:, :, :1].squeeze(), x[:, :, :1].squeeze(2), x[:, :1].squeeze((1, -1)), x.squeeze(0)],
    "squeezed copies": lambda x: [torch.squeeze_copy(x[:, :, :1]), torch.squeeze_copy(x)],
    "squeezed in place": lambda x: [(x[..., :1] * 1).squeeze_(-1) * 2, (x[:, :, :1] * 1).squeeze_()],
    "views in place": lambda x: [(x * 1).unsqueeze_(0) * 2, (x * 1).transpose_(2, 3) * 2, (x[0, 0] * 1).t_() * 2],
    "flattened": lambda x: [x[:, :, :1, :1].flatten(1), x[:, :1].flatten(1), x[:, :1, :1].reshape(x.shape[0], -1)],
    "viewed": lambda x: x[:, :, :1, :1].reshape(x.shape[:2]) @ random(x.shape[1], 3),
    "one piece": lambda x: [*x.chunk(1, 2), *x.split(x.shape[2], 2), *x.split([x.shape[3], 0], 3), *x.chunk(1, 1)],
    "least and greatest": least_and_greatest,
    "repeated": lambda x: [x.repeat(2, 1, 3, 2), x[:, :1].repeat(1, 4, 1, 1), x[:, :, :1].tile((2, 1, 5, 1))],
    "nothing": lambda x: [x[:, :, :0] * x[:, :, :1], x[:, :, :0].flatten(1) + 1, x.tile((0,))],
    "no samples": without_samples,
    "a plain gradient": lambda x: torch._softmax_backward_data(x, random(*x.shape).softmax(2), 2, torch.float64),
    "a kernel beyond the map": lambda x: [F.avg_pool2d(x, 30000, ceil_mode=True), F.max_pool2d(x, 9, ceil_mode=True)],
    "padded beyond the map": lambda x: F.avg_pool2d(x, (9, 30000), padding=(2, 4), ceil_mode=True),
}


def flattened(x: Tensor) -> Tensor:
    """Rows and columns as one dim, as tokens are."""
    return x.flatten(2)


TOGETHER: dict[str, Operator] = {
    "convolution": lambda x: F.conv1d(flattened(x), random(3, x.shape[1], 5), random(3), padding=2),
    "strided, dilated": lambda x: F.conv1d(flattened(x), random(3, x.shape[1], 3), stride=2, dilation=2),
    "transposed": lambda x: F.conv_transpose1d(flattened(x), random(x.shape[1], 2, 4), stride=3, padding=1),
    "pools": lambda x: F.avg_pool1d(flattened(x), 3, 2) + F.max_pool1d(flattened(x), 3, 2),
    "adaptive pools": lambda x: F.adaptive_avg_pool1d(flattened(x), 3) + F.adaptive_max_pool1d(flattened(x), 1),
    "resized": lambda x: F.interpolate(flattened(x), 9, mode="linear") + F.interpolate(flattened(x), 9),
    "pointwise": lambda x: flattened(x) * flattened(x)[:, :1] + flattened(x)[..., :1],
    "response norm": lambda x: F.local_response_norm(x, 2),
    "one column": lambda x: F.conv2d(flattened(x).unsqueeze(-1), random(2, x.shape[1], 3, 1), padding=(1, 0)),
}


def attended(x: Tensor) -> Tensor:
    """Channels weighed by a convolution along them."""
    gate = F.conv1d(x.mean((2, 3)).view(x.shape[0], 1, -1), random(1, 1, 3), padding=1)
    return x * gate.view(x.shape[0], -1, 1, 1).sigmoid()


def mixed(x: Tensor) -> Tensor:
    """Pooled maps beside maps of one element."""
    both = torch.cat([x.mean((2, 3), keepdim=True), x[:, :, :1, :1]], 1)
    return F.conv2d(both, random(2, both.shape[1], 1, 1)) + F.interpolate(x[:, :1, :1, :1], 3)[..., :1, :1]


def positioned(x: Tensor) -> Tensor:
    """A convolution of numbers that every rank has whole, as of positions, added to what is sharded."""
    weight = x.mean((0, 2, 3)).view(-1, 1, 1, 1) * random(x.shape[1], 3, 1, 1)
    return x + F.conv2d(random(1, 3, *x.shape[2:]), weight)


UNUSUAL: dict[str, Operator] = {
    "positions": positioned,
    "channels as length": attended,
    "pooled and single": mixed,
    "pooled beside all": lambda x: torch.cat([x.mean((2, 3), keepdim=True).expand(x.shape), x], 1),
    "padded by nothing": lambda x: F.pad(x, (0, 0, 0, 0), mode="circular").add_(1) * x,
    "one sample": lambda x: F.conv2d(x[0], random(3, x.shape[1], 3, 3), stride=2, padding=1),
    "one sample, transposed": lambda x: F.conv_transpose2d(x[0], random(x.shape[1], 2, 3, 3), stride=2),
    "one sample, pooled": lambda x: F.max_pool2d(x[0], 2) + F.avg_pool2d(x[0], 2),
    "cropped and reflected": lambda x: F.pad(x, (-1, 1, 1, -1), mode="reflect"),
    "cropped and repeated": lambda x: F.pad(x, (-1, 2, -1, 2), mode="replicate"),
    "cropped and around": lambda x: F.pad(x, (2, -1, -1, 1), mode="circular"),
    "cropped": lambda x: F.pad(x, (-1, 1, 2, -2)),
    "smaller, antialiased": lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True),
    "larger, antialiased": lambda x: F.interpolate(x, (9, 5), mode="bicubic", antialias=True, align_corners=True),
    "by a factor, antialiased": lambda x: F.interpolate(x, scale_factor=0.7, mode="bilinear", antialias=True),
}


def compare(names: list[str], partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    table = BROADCAST | DIMS | TOGETHER | UNUSUAL
    return differing({name: table[name] for name in names}, partition, shape)


@pytest.mark.parametrize(
    "size, partition, shape",
    [
        (1, "height=1,channel=1", (2, 3, 4, 3)),
        (3, "height=3", (2, 3, 5, 4)),
        (4, "channel=4", (2, 4, 3, 4)),
        (4, "height=2,width=2", (1, 3, 5, 4)),
        (4, "sample=2,channel=2", (3, 3, 4, 3)),
    ],
)
@pytest.mark.parametrize(
    "table", [BROADCAST, DIMS, TOGETHER, UNUSUAL], ids=["broadcast", "dims", "together", "unusual"]
)
def test_operators_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, shape: tuple[int, ...], table: dict[str, Operator]
) -> None:
    for rank, wrong in enumerate(ranks(size).run(compare, list(table), partition, shape)):
        assert not wrong, f"rank {rank}"


ANY: dict[str, Operator] = {
    "gates": lambda x: x * x.sum(2, keepdim=True) * x[:, :, :1] * x[..., :1] * F.adaptive_avg_pool2d(x, 1),
    "in place": lambda x: (x * 1).add_(x[:, :1]).mul_(x[:1]),
    "sums": lambda x: x + x.sum(2, keepdim=True) / x.shape[2] - x.sum((1, 3), keepdim=True),
    "convolutions": lambda x: (
        F.conv2d(x, random(3, x.shape[1], 3, 3), padding=1) * F.conv2d(x, random(1, x.shape[1], 1, 1))
    ),
    "tokens": lambda x: F.conv1d(x.flatten(2), random(2, x.shape[1], 3), padding=1),
    "features": lambda x: F.linear(x.flatten(1), random(3, x[0].numel())),
    "pools": lambda x: F.max_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, 3, 1, 1),
    "views": lambda x: [x.flatten(), x.squeeze(), x.squeeze((1, 3)), (x * 1).squeeze_(2) * 2, x.unflatten(1, (1, -1))],
    "grown": lambda x: [x[:, :, :1].expand(-1, -1, 3, -1), x.repeat(1, 2, 3, 1), x.repeat(2, 1, 1, 1, 4), x.tile((2,))],
    "pieces": lambda x: [*x.chunk(1, 2), *x.chunk(3, 2), *x.split(2, 3), x.roll(1, 2), x.flip(2), x[:, :, ::2]],
    "padded": lambda x: [
        F.pad(x, (1, 1, 1, 1), mode="circular"),
        F.pad(x, (-1, 1, 1, 0)),
        F.glu(torch.cat([x, x], 2), 2),
    ],
    "resized": lambda x: F.interpolate(x, (3, 4)) + F.interpolate(x, (3, 4), mode="bilinear"),
}


def compare_any(partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return differing(ANY, partition, shape)


@settings(max_examples=5)
@given(
    st.sampled_from(["height=4", "height=2,width=2", "channel=2,height=2", "channel=4"]),
    st.tuples(st.integers(1, 2), *[st.sampled_from([1, 1, 2, 3, 5])] * 3),
)
def test_dims_shorter_than_their_axes(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for rank, wrong in enumerate(ranks(4).run(compare_any, partition, shape)):
        assert not wrong, f"rank {rank}"


class ChannelAttention(nn.Module):
    """Efficient channel attention: its weight lies over the channel axis, and its input's length does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before = nn.Conv2d(channels, channels, 3, padding=1)
        self.along = nn.Conv1d(1, 1, 3, padding=1)
        self.after = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gate = self.along(F.adaptive_avg_pool2d(y, 1).squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        y = y * gate.sigmoid().expand_as(y)
        return y * self.after(y).sigmoid()


def attention_errors(partition: str) -> dict[str, float]:
    return errors(lambda: ChannelAttention(4), [(2, 4, 5, 3)], partition)


@pytest.mark.parametrize("size, partition", [(2, "channel=2,width=1"), (4, "channel=2,height=2"), (4, "channel=4")])
def test_channel_attention(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    for rank, found in enumerate(ranks(size).run(attention_errors, partition)):
        assert max(found.values()) < 1e-11, f"rank {rank}: {found}"


def refusals() -> dict[str, tuple[str, float]]:
    """{operator: its refusal, and how many seconds of this process it took}."""
    mesh = distconv.init("height=2", device_type="cpu")
    x = distconv.shard(torch.randn(2, 4, 6, 6), mesh)
    found = {}
    for name, attempt in {
        "aten.poisson": lambda: torch.poisson(x.abs()),
        "aten.binomial": lambda: torch.binomial(x.abs(), x.sigmoid()),
        "aten.rrelu_with_noise_": lambda: F.rrelu(x * 1, training=True, inplace=True),
    }.items():
        start = time.process_time()
        try:
            with gathered_up_to(0):
                attempt()
        except distconv.UnsupportedOperation as error:
            found[name] = str(error), time.process_time() - start
    return found


def test_refusals_name_operator_and_shapes_at_once(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refusals)
    assert {name: text for name, (text, _) in first.items()} == {name: text for name, (text, _) in second.items()}
    for name, (text, seconds) in first.items():
        assert text.startswith(name) and "2" in text and seconds < 1, (name, text, seconds)
    assert "aten.poisson" in first
