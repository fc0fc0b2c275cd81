"""Operators of every family, forward and backward, against one process in float64: a result means the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import differing, random
from torch import Tensor

pytestmark = pytest.mark.gloo

Operator = Callable[[Tensor], Tensor]


def like(x: Tensor) -> Tensor:
    return random(*x.shape)


def classes(x: Tensor) -> Tensor:
    """Plain class numbers (N, spatial...) of the whole shape."""
    shape = (x.shape[0], *x.shape[2:])
    return torch.randint(x.shape[1], shape, generator=torch.Generator().manual_seed(2))


def weights(x: Tensor) -> Tensor:
    return random(x.shape[1], seed=3).abs()


def soft_dice(x: Tensor) -> Tensor:
    p, target = x.softmax(1), F.one_hot(classes(x), x.shape[1]).movedim(-1, 1).double()
    return 1 - ((2 * (p * target).sum((0, 2, 3)) + 1) / (p.sum((0, 2, 3)) + target.sum((0, 2, 3)) + 1)).mean()


def flat_dice(x: Tensor) -> Tensor:
    p, target = x.sigmoid().view(-1), (like(x) > 0).double().view(-1)
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def assigned(x: Tensor, key: Any, value: Any) -> Tensor:
    y = x * 1
    y[key] = value
    return y


def copied(x: Tensor) -> Tensor:
    """Parts of x in a plain tensor, as Fourier layers keep the frequencies that they have mixed."""
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[:, :, 1:3] = 2 * x[:, :, 1:3]
    y[:, 0] = x[:, 1]
    return y * y + x


def modulated(x: Tensor, convolution: Callable[..., Tensor], weight: Tensor) -> Tensor:
    """A convolution with a kernel for each sample, which the sample itself scales."""
    scale = x.mean((2, 3)).view(x.shape[0], *(n if n == x.shape[1] else 1 for n in weight.shape[:2]), 1, 1)
    y = convolution(x.reshape(1, -1, *x.shape[2:]), (weight * scale).flatten(0, 1), padding=1, groups=x.shape[0])
    return y.view(x.shape[0], -1, *y.shape[2:])


def correlated(x: Tensor, template: Tensor, groups: int) -> Tensor:
    return F.conv2d(x.reshape(1, -1, *x.shape[2:]), template, groups=groups).view(x.shape[0], groups // x.shape[0], -1)


def running(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    total += x.detach().mean()
    return total


def numbers(x: Tensor) -> Tensor:
    """What leaves as numbers."""
    x = x.detach()
    formatted = f"{x.mean():.6f}"
    return torch.tensor(
        [
            x.mean().item(),
            float(x.sum()),
            int((x > 0).sum()),
            bool((x > 9).any()),
            float(formatted),
            *x.mean((0, 2, 3)).tolist(),
        ]
    )


REDUCTIONS: dict[str, Operator] = {
    f"{name} over {dims}": lambda x, name=name, dims=dims: getattr(x, name)(dims)  # type: ignore[misc]
    for name in ("sum", "mean", "var", "std", "amax", "amin", "logsumexp")
    for dims in ((2, 3), (0, 2, 3), (1,), (0,))
} | {
    f"{name} of all": lambda x, name=name: getattr(x, name)()  # type: ignore[misc]
    for name in ("sum", "mean", "var", "std", "max", "min", "norm", "argmax")
}
REDUCTIONS |= {
    "max along h": lambda x: x.max(2)[0],
    "argmax along h": lambda x: x.argmax(2),
    "argmax along c": lambda x: x.argmax(1),
    "argmin along w, kept": lambda x: x.argmin(3, keepdim=True),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norms of samples": lambda x: torch.linalg.vector_norm(x, 3, dim=(1, 2, 3)),
    "logsumexp of no samples": lambda x: x[:0].logsumexp(0).exp() + x,
    "biased variance and mean": lambda x: sum(torch.var_mean(x, dim=(0, 2, 3), unbiased=False)),  # type: ignore[arg-type]
    "centred": lambda x: x - x.mean(dim=(2, 3), keepdim=True),
    "scaled to 0..1": lambda x: (x - x.min()) / (x.max() - x.min()),
    "normalized by hand": lambda x: (x - x.mean((2, 3), True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt(),
    "softmax over c": lambda x: x.softmax(1),
    "softmax over h": lambda x: x.softmax(2),
    "log-softmax over w": lambda x: x.log_softmax(3),
    "softmax over n": lambda x: x.softmax(0),
    "accuracy": lambda x: (x.argmax(1) == classes(x)).float().mean(),
    "count": lambda x: ((x > 0) & (x < 1)).sum((2, 3)),
    "any and all": lambda x: torch.stack([(x > 2).any(), (x < 9).all()]),
    "numbers": numbers,
    "running sum": running,
    "copied into a plain tensor": copied,
    "shape": lambda x: torch.tensor([*x.shape, x.numel(), len(x)]),
}

REDUCED = ("mean", "sum", "none")
LOSSES: dict[str, Operator] = {}
for _reduction in REDUCED:
    _options: dict[str, dict[str, Any]] = {
        "": {},
        ", ignored": {"ignore_index": 1},
        ", smoothed": {"label_smoothing": 0.1},
        ", both": {"label_smoothing": 0.1, "ignore_index": 0},
    }
    for _name, _option in _options.items():
        _option = _option | {"reduction": _reduction}
        LOSSES[f"cross entropy{_name}, {_reduction}"] = lambda x, o=_option: F.cross_entropy(x, classes(x), **o)  # type: ignore[misc]
        LOSSES[f"cross entropy{_name}, weights, {_reduction}"] = (  # type: ignore[assignment]
            lambda x, o=_option: F.cross_entropy(x, classes(x), weights(x), **o)  # type: ignore[misc]
        )
    LOSSES[f"cross entropy, probabilities, {_reduction}"] = lambda x, r=_reduction: F.cross_entropy(  # type: ignore[misc]
        x, like(x).softmax(1), weights(x), label_smoothing=0.2, reduction=r
    )
    LOSSES[f"class scores, {_reduction}"] = lambda x, r=_reduction: F.cross_entropy(  # type: ignore[misc]
        x.mean((2, 3)), classes(x)[:, 0, 0], reduction=r
    )
    LOSSES[f"class scores, classes of a byte, {_reduction}"] = lambda x, r=_reduction: F.cross_entropy(  # type: ignore[misc]
        x.mean((2, 3)), classes(x)[:, 0, 0].byte(), reduction=r
    )
    for _loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        LOSSES[f"{_loss.__name__}, {_reduction}"] = lambda x, f=_loss, r=_reduction: f(x, like(x), reduction=r)  # type: ignore[misc]
    LOSSES[f"binary, {_reduction}"] = lambda x, r=_reduction: F.binary_cross_entropy(  # type: ignore[misc]
        x.sigmoid(), like(x).sigmoid(), like(x).abs(), reduction=r
    )
    LOSSES[f"binary, logits, {_reduction}"] = lambda x, r=_reduction: F.binary_cross_entropy_with_logits(  # type: ignore[misc]
        x, like(x).sigmoid(), pos_weight=random(x.shape[1], 1, 1).abs(), reduction=r
    )
LOSSES |= {
    "soft Dice": soft_dice,
    "flat Dice": flat_dice,
    "total variation": lambda x: (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + x[..., 1:].sub(x[..., :-1]).abs().mean(),
}


def large_channels(x: Tensor) -> Tensor:
    return x.detach().abs().mean((0, 2, 3)) >= x.detach().abs().mean()


SHAPES: dict[str, Operator] = {
    "flatten, linear": lambda x: F.linear(x.flatten(1), random(5, x.shape[1:].numel()), random(5, seed=4)),
    "view, linear": lambda x: F.linear(x.view(x.size(0), -1), random(5, x.shape[1:].numel())),
    "kernels of samples": lambda x: modulated(x, F.conv2d, random(5, x.shape[1], 3, 2)),
    "transposed kernels of samples": lambda x: modulated(x, F.conv_transpose2d, random(x.shape[1], 5, 3, 2)),
    "templates of samples": lambda x: correlated(x, x[:, :, 1:4, :3], x.shape[0]),
    "templates of channels": lambda x: correlated(x, x[:, :, :2, 1:].flatten(0, 1)[:, None], x.shape[:2].numel()),
    "one template": lambda x: F.conv2d(x, x[:2, :, 1:4, :3], x[0, 0, 0, :2]),
    "linear of activations": lambda x: F.linear(x.mean((2, 3)), x[:, :, 0, 0], x[:, 0, 1, 1]),
    "linear of rows": lambda x: F.linear(x.movedim(1, 3), x[0, :, :, 0].t()),
    "flat": lambda x: x.flatten().square(),
    "flatten space": lambda x: x.flatten(2).transpose(1, 2),
    "and back": lambda x: x.flatten(2).softmax(1).view(x.shape),
    "groups of channels": lambda x: torch.cat([x, x], 1).unflatten(1, (2, -1)).sum(1),
    "linear on channels": lambda x: F.linear(x.permute(0, 2, 3, 1), random(4, x.shape[1])).permute(0, 3, 1, 2),
    "gram": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "squeeze and excite": lambda x: (
        x * F.linear(x.mean((2, 3)), random(x.shape[1], x.shape[1])).sigmoid()[:, :, None, None]
    ),
    "slice channels": lambda x: x[:, 1:],
    "crop": lambda x: x[:, :, 1:-1, 1:3],
    "slices that begin before a dim": lambda x: x[-100:] * x[:, :, -100:] * x[..., -100:100],
    "every second row": lambda x: x[:, :, 1::2],
    "one row": lambda x: x[:, :, -1],
    "one sample": lambda x: x[0],
    "one element": lambda x: x[0, 0, 0, 0],
    "split rows": lambda x: torch.cat(x.split([2, x.shape[2] - 2], 2)[::-1], 2),
    "chunk channels": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "unbind columns": lambda x: torch.stack(x.unbind(3)[::-1], 1),
    "concatenate channels": lambda x: torch.cat([x, like(x)], 1),
    "concatenate samples": lambda x: torch.cat([x, x[:1] * 2], 0),
    "concatenate rows": lambda x: torch.cat([x, x[:, :, :1], like(x)], 2),
    "stack": lambda x: [torch.stack([x, x * 2]), torch.stack([x, x * 2], -1), torch.stack([x, x * 2], -3)],
    "stack of other layouts": lambda x: torch.stack([x.sort(3)[0], x.sort(2)[0], x, x.sort(1)[0]], 1),
    "flip": lambda x: x.flip((1, 2, 3)),
    "roll": lambda x: x.roll((1, -2, 1), (1, 2, 3)),
    "resize to its size": lambda x: x * x.detach().clone().resize_(x.shape).resize_as_(x.detach()),
    "pixel shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x * 2, x * 3, x * 4], 1), 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(torch.cat([x, x * 2], 2)[..., : x.shape[3] // 2 * 2], 2),
    "assign a channel": lambda x: assigned(x, (slice(None), 0), 7.0),
    "assign through a mask": lambda x: assigned(x, like(x) > 0, 0.0),
    "channels of a mask": lambda x: x[:, large_channels(x)].square(),
    "assign channels of a mask": lambda x: assigned(x, (slice(None), large_channels(x)), 0.0),
    "scatter channels": lambda x: (
        x.scatter(1, x.argsort(1), like(x))
        + like(x).scatter_add(1, x.argsort(1), x)
        + x.scatter(1, x.argmax(1, True), 0.5)
    ),
    "index channels": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "broadcast rows": lambda x: x * random(*x.shape[2:]) + torch.arange(x.shape[3]),
    "in place": lambda x: F.relu_((x * 1).add_(like(x)).mul_(2)),
    "where": lambda x: torch.where(like(x) > 0, x, 0.1 * x).masked_fill(like(x) > 1, 2.0).clamp(-1, 1),
}

ACTIVATIONS: dict[str, Operator] = {
    "leaky": lambda x: F.leaky_relu(x) + F.elu(x) + F.selu(x) + F.celu(x) + F.prelu(x, weights(x)),
    "hard": lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.relu6(x) + F.hardshrink(x) + F.threshold(x, 0.1, 0.2),
    "soft": lambda x: F.gelu(x) + F.mish(x) + F.silu(x) + F.softplus(x) + F.softshrink(x) + x.sigmoid().logit(),
    "leaky, in place": lambda x: F.leaky_relu(x * 1, inplace=True) + F.elu(x * 1, inplace=True),
    "soft, in place": lambda x: F.silu(x * 1, inplace=True) + F.mish(x * 1, inplace=True),
    "hard, in place": lambda x: F.hardsigmoid(x * 1, inplace=True) + F.hardswish(x * 1, inplace=True),
    "threshold, in place": lambda x: F.threshold(x * 1, 0.1, 0.2, inplace=True) + F.relu6(x * 1, inplace=True),
    "clamped in place": lambda x: F.hardtanh(x * 1, inplace=True) + (x * 1).clamp_min_(-0.3).clamp_max_(0.3),
}


def compare(names: list[str], partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """{operator: what differs from one process}."""
    table = REDUCTIONS | LOSSES | SHAPES | ACTIVATIONS
    return differing({name: table[name] for name in names}, partition, shape)


@pytest.mark.parametrize(
    "table", [REDUCTIONS, LOSSES, SHAPES, ACTIVATIONS], ids=["reductions", "losses", "shapes", "activations"]
)
@pytest.mark.parametrize(
    "size, partition, shape",
    [
        (1, "height=1", (2, 3, 5, 4)),
        (2, "sample=2", (3, 3, 5, 4)),
        (3, "width=3", (2, 3, 6, 7)),
        (4, "height=4", (2, 3, 5, 6)),
        (4, "sample=2,height=2", (3, 3, 7, 4)),
        (4, "height=2,width=2", (2, 3, 7, 5)),
    ],
)
def test_operators_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, shape: tuple[int, ...], table: dict[str, Operator]
) -> None:
    for rank, wrong in enumerate(ranks(size).run(compare, list(table), partition, shape)):
        assert not wrong, f"rank {rank}"


def test_activations_of_a_dim_shorter_than_its_axis(ranks: Callable[[int], Ranks]) -> None:
    for rank, wrong in enumerate(ranks(4).run(compare, list(ACTIVATIONS), "height=4", (2, 3, 2, 5))):
        assert not wrong, f"rank {rank}"
