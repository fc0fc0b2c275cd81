"""Models whose layers compute on a rank's own tensors: whatever else a script does with activations stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv
from distconv import settings

pytestmark = pytest.mark.gloo


class Square(torch.autograd.Function):
    """A script's own function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Net(nn.Module):
    """Computes a loss from its layers by one of the functions below."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.layer, self.norm = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
            nn.BatchNorm2d(3),
        )
        self.head = nn.Linear(3, 2)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


def in_place(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y.mul_(2)
    z += 1
    y = F.relu(y, inplace=True)
    return (y * z).sum()


def divided_in_place(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    same, used = y, y.mean()
    y /= 2
    return used + same.mean() * 3 + (y * y).sum()


def divided_weight(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight /= 2
        m.layer.weight **= 2
    return m.layer(x).square().sum()


def in_place_by_position(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    before = y.sum()
    F.leaky_relu(y, 0.1, True)
    return before + (y * y).sum() + 3 * y.sum()


def in_place_on_a_view(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[..., :2].mul_(3)
    return (F.relu(y) * y).sum()


def set_items(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[..., 0] = 0
    return m.layer(y).sum()


def hook_after_use(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    used = F.relu(y).sum() + y.mean()
    y.register_hook(lambda grad: grad * 3)
    return used + (y * 2).sum()


def kept_gradient(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    used = y.square().mean()
    y.retain_grad()
    loss = used + F.relu(y).sum()
    if torch.is_grad_enabled():
        loss.backward(retain_graph=True)
        loss = loss + (y.grad * y).sum()
    return loss


def own_function(m: Net, x: Tensor) -> Tensor:
    return Square.apply(m.norm(m.layer(x))).sum()


def checkpointed(m: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: m.norm(F.relu(m.layer(x))), m.first(x), use_reentrant=False).square().sum()


def checkpointed_within(m: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: m.norm(F.relu(m.layer(x))), m.first(x), use_reentrant=True).square().sum()


def checkpointed_twice(m: Net, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return F.relu(m.layer(F.adaptive_avg_pool2d(x, (4, 3))))

    def outer(x: Tensor) -> Tensor:
        return m.norm(checkpoint(inner, m.layer(x), use_reentrant=False).tanh())

    return checkpoint(outer, m.first(x), use_reentrant=False).square().sum()


def checkpointed_beneath_hooks(m: Net, x: Tensor) -> Tensor:
    def relu(x: Tensor) -> Tensor:
        return m.norm(m.layer(F.relu(m.layer(x), inplace=True)))

    with torch.autograd.graph.save_on_cpu():
        return checkpoint(relu, m.first(x), use_reentrant=False).square().sum()


def checkpointed_without_modules(m: Net, x: Tensor) -> Tensor:
    def parameters(x: Tensor) -> Tensor:
        y = F.conv2d(F.relu(x), m.layer.weight, m.layer.bias, 1, 1)
        y = F.batch_norm(y, m.norm.running_mean, m.norm.running_var, None, m.norm.bias, True)
        return y.sigmoid() * m.norm.weight.view(-1, 1, 1)

    return checkpoint(parameters, m.first(x), use_reentrant=False).square().sum()


def changed_weight(m: Net, x: Tensor) -> Tensor:
    return F.conv2d(x, m.layer.weight * 2, m.layer.bias, 1, 1).sum() + m.layer(x).square().sum()


def shared_layer(m: Net, x: Tensor) -> Tensor:
    return m.layer(F.relu(m.layer(m.layer(x)))).sum()


def without_gradient(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        norm = y.square().sum().sqrt()
        scale = m.first.weight.sum()
    return (y / norm).sum() + scale * y.square().mean() + m.first(y).sum()


def gradient_of_a_gradient(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(m.norm(F.softplus(m.layer(y))).pow(3).mean(), y, create_graph=True)
    return (grad * grad * y).sum()


def gradient_of_a_leaf(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y, z = m.layer(x), m.layer(x) * 2
    F.relu(y)
    y.requires_grad_()
    z.requires_grad = True
    loss = m.layer(F.relu(y) * z).square().sum()
    (grad,) = torch.autograd.grad(loss, y, create_graph=True)
    loss.backward(retain_graph=True)
    assert y.is_leaf and z.grad is not None
    return loss + grad.square().sum() + (z.grad * z).sum() + x.sum()


def detached(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    return (F.relu(y) * y.detach()).sum() + (y.data * 2).sum()


def joined(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    return torch.cat([y, F.relu(y), torch.where(y > 0, y, 0.1 * y)], 1).square().sum()


def cut(m: Net, x: Tensor) -> Tensor:
    y = m.norm(m.layer(x))
    return sum((part.square().sum() for part in y.chunk(3, 1)), torch.stack([y, y]).mean())


def channels_last(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x.contiguous(memory_format=torch.channels_last))
    return F.relu(m.norm(y).contiguous()).square().sum() + float(y.dim() + y.shape[0] + y.numel())


def sizes_in_lists(m: Net, x: Tensor) -> Tensor:
    y = F.conv2d(x, m.first.weight, m.first.bias, [2, 1], [1, 1], [1, 1])
    y = F.conv_transpose2d(y, m.layer.weight, m.layer.bias, [1, 2], [1, 0], [0, 1], 1, [1, 1])
    return F.max_pool2d(y, [2, 2], [1, 1]).square().sum()


def groups(m: Net, x: Tensor) -> Tensor:
    y = F.group_norm(m.layer(x), 1, m.norm.weight, m.norm.bias)
    y = F.dropout(F.group_norm(y, 3), 0.5, False).clone()
    return (F.group_norm(y.mul_(2), 3, m.norm.weight) * y).pow(3).sum()


def pooled(m: Net, x: Tensor) -> Tensor:
    y = F.max_pool2d(m.layer(x), 3, 2, 1) + F.max_pool2d(m.first(x), (2, 1), (2, 2), ceil_mode=True, dilation=1)
    largest, _ = F.max_pool2d(y, 2, return_indices=True)
    means = F.adaptive_avg_pool2d(y, 1), F.adaptive_avg_pool2d(m.layer(x), (3, None))
    rows = F.linear(means[0].flatten(1).square(), m.head.weight)
    return m.head(means[0].flatten(1)).pow(3).sum() + rows.sum() + largest.sum() + means[1].square().sum()


def rows_of_pixels(m: Net, x: Tensor) -> Tensor:
    return m.head(m.layer(x).permute(0, 2, 3, 1)).pow(3).sum()


def gradient_of_a_gradient_of_pools(m: Net, x: Tensor) -> Tensor:
    y = m.layer(x)
    rows = F.adaptive_avg_pool2d(F.max_pool2d(y, 2, 1).pow(3), 1).flatten(1)
    (grad,) = torch.autograd.grad(m.head(rows).pow(2).sum(), y, create_graph=True)
    return (grad * grad * y).sum()


def padded(m: Net, x: Tensor) -> Tensor:
    y = F.pad(m.layer(x), (1, 2, 0, 1), "replicate")
    y = F.pad(F.pad(y, (1, 0)).mul_(2), (0, 0, -1, 2), "circular")
    return F.pad(m.layer(y), (2, 1, 1, 2), "reflect").square().sum()


def filled(m: Net, x: Tensor) -> Tensor:
    """A new tensor above the size that a rank gathers within a model."""
    y = m.layer(x)
    z = torch.zeros(4, 6, 160, 40, dtype=torch.float32).to(y)
    z[:, :, :2] = 0.5
    z[:, 1:4, :6, :5] = y
    z[:, :3, 2:8, 1:6] += y.flip(2)
    with torch.no_grad():
        z[:, 4] = 2.0
        z[:, 5, :6, :5] = y[:, 0]
    wide = F.pad(y, (0, 35, 0, 154))
    z[:, torch.arange(6) == 3] = wide[:, :1]
    return (torch.cat([z, wide], 1) * torch.cat([wide, z], 1)).square().sum()


def volume(m: Net, x: Tensor) -> Tensor:
    """Of costs, as stereo networks fill it."""
    left, right = (F.pad(m.layer(each), (0, 16, 0, 26)) for each in (x, x.flip(3)))
    z = left.new_zeros(4, 6, 9, 32, 21)
    for i in range(9):
        z[:, :3, i, :, i:] = left[..., i:]
        z[:, 3:, i, :, i:] = right[..., : 21 - i]
    return F.conv3d(z, m.layer.weight.repeat(1, 2, 1, 1)[:, :, None]).square().sum()


def not_filled(m: Net, x: Tensor) -> Tensor:
    """New tensors that stay plain, and their views."""
    wide = F.pad(m.layer(x), (0, 35, 0, 154)).repeat(1, 2, 1, 1)
    read, drawn, kept, listed = (x.new_full((4, 6, 160, 40), number) for number in (1, 2, 3, 4))
    assert read.shape == drawn.size() and kept.is_contiguous() and read[0].stride() == (6400, 40, 1)
    first = kept[0]
    kept[:, :, ::3] = 0.25
    listed[torch.arange(4) > 1] = torch.linspace(0, 1, 40, dtype=x.dtype)
    drawn.mul_(3)
    own = Square.apply(read)  # type: ignore[no-untyped-call]
    first[1] += 1.0
    assert type(copy.deepcopy(kept)) is type(kept + 0) is Tensor and kept.numpy().max() == 4
    return (wide * (own + drawn + kept + listed) + first.sum()).sum()


LOSSES = (
    *(
        in_place,
        divided_in_place,
        divided_weight,
        in_place_by_position,
        in_place_on_a_view,
        set_items,
        hook_after_use,
        kept_gradient,
        own_function,
    ),
    *(
        checkpointed,
        checkpointed_within,
        checkpointed_twice,
        checkpointed_beneath_hooks,
        checkpointed_without_modules,
        changed_weight,
        shared_layer,
        without_gradient,
        gradient_of_a_gradient,
        gradient_of_a_leaf,
        detached,
        joined,
        cut,
        channels_last,
        sizes_in_lists,
        groups,
        pooled,
        rows_of_pixels,
        gradient_of_a_gradient_of_pools,
        padded,
        filled,
        volume,
        not_filled,
    ),
)


def loss_and_gradients(
    loss: Callable[[Any, Tensor], Tensor], partition: str | None, halo: str = "layer"
) -> list[Tensor]:
    x = torch.randn(4, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    model: nn.Module = Net(loss).double()
    if partition is not None:
        model = distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
    with settings.options({"halo": halo}):
        for _ in range(2 if halo == "chain" else 0):
            model(x)
        value = model(x)
    value.backward()
    grads = [distconv.whole_state(p.grad) for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [distconv.gather(value.detach()), x.grad, *grads, *model.buffers()]


def differences(partition: str, halo: str) -> dict[str, str]:
    found = {}
    for loss in LOSSES:
        expected, here = loss_and_gradients(loss, None, halo), loss_and_gradients(loss, partition, halo)
        if len(expected) != len(here) or not all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(here, expected, strict=True)
        ):
            found[loss.__name__] = f"{[float((a - b).abs().max()) for a, b in zip(here, expected, strict=False)]}"
    return found


@pytest.mark.parametrize(
    ("partition", "halo"),
    [("sample=2", "layer"), ("height=2", "layer"), ("height=2", "chain"), ("channel=2", "layer")],
)
def test_what_a_script_does_with_activations(ranks: Callable[[int], Ranks], partition: str, halo: str) -> None:
    assert ranks(2).run(differences, partition, halo) == [{}, {}]


def refused_changes() -> list[str]:
    """The errors of backward where what an activation function has kept was changed in place, by whatever way."""
    mesh = distconv.init("height=2", device_type="cpu")
    errors = []

    def within(m: Net, x: Tensor) -> Tensor:
        y = torch.sigmoid(m.layer(x))
        y[:, :1].add_(1)
        return y.sum()

    def outside(m: Net, x: Tensor) -> Tensor:
        return torch.sigmoid(m.layer(x))

    for loss in (within, outside):
        model = distconv.parallelize(Net(loss).double(), mesh)
        y = model(torch.ones(2, 3, 6, 5, dtype=torch.float64))
        try:
            (y if loss is within else y.mul_(2)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error)[:60])
    return errors


def test_a_change_of_what_backward_needs_is_noticed(ranks: Callable[[int], Ranks]) -> None:
    noticed = "one of the variables needed for gradient computation has bee"
    assert ranks(2).run(refused_changes) == [[noticed, noticed]] * 2
