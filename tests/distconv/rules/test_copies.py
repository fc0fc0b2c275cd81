"""What is a view in one process and a copy here: a change in place reaches its tensor; else it is refused alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import differing
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo


def added(x: Tensor, to: Tensor) -> Tensor:
    to += 1
    return x


def assigned(x: Tensor, to: Tensor, value: Any) -> Tensor:
    to[...] = value
    return x


def set_rows(x: Tensor) -> Tensor:
    x[:, :, 0] = 2
    x[..., 1:4] = x[..., :1] * 3
    x[:, :, ::3, -1] = torch.arange(3)
    x[0, 1, 2] = x[1, 1, 2].flip(0)
    return x


CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda x: x[:, :, 1:].add_(1),
    "of a tensor": lambda x: x[:, :, 1:].mul_(x[:, :, :-1] * 1),
    "+=": lambda x: added(x, x[:, :, 1:]),
    "assignment": lambda x: assigned(x, x[:, :, 1:], 0.0),
    "assignments": set_rows,
    "an activation": lambda x: F.relu(x[:, :, :-1], inplace=True),
    "zeros": lambda x: x[:, :, ::2].zero_(),
    "rows that stay on most ranks": lambda x: x[:, :, :6].clamp_(0, 1),
    "one row": lambda x: x[:, :, 0].sub_(1),
    "rows by turns": lambda x: x.unbind(2)[1].abs_(),
    "a part": lambda x: x.split([3, x.shape[2] - 3], 2)[1].abs_(),
    "a view of rows": lambda x: x[:, :, 1:].transpose(0, 1)[1].neg_(),
    "a copy of a copy": lambda x: x[:, :, 1:6][:, :, 2:].mul_(3)[..., 1:].add_(1),
    "rows without gradient": lambda x: x[:, :, 1:].detach().exp_(),
    "a flat view": lambda x: x.flatten(1).sin_(),
    "a row without its dim": lambda x: x[:, :, :1].squeeze(2).add_(1).mul_(2),
    "a diagonal": lambda x: x.diagonal(1, 2, 3).fill_(3),
    "pieces": lambda x: [piece.mul_(number) for number, piece in enumerate(x.chunk(3, 2))],
    "pieces, of rows by turns": lambda x: [y.add_(1) for y in (x[:, :, ::2], x[:, :, 1::2])],
    "twice": lambda x: x[:, :, 2:].add_(1).mul_(3),
    "itself": lambda x: x.add_(1),
    "channels": lambda x: x[:, 1:].add_(1),
    "all rows": lambda x: x[:, :, :].relu_(),
    "a channel": lambda x: x[:, 1].zero_(),
    "a copy": lambda x: x[:, :, 1:].clone().add_(1),
    "a result": lambda x: F.relu(x[:, :, 1:] * 2, inplace=True).abs_(),
    "out=": lambda x: torch.add(x[:, :, 1:] * 1, 1, out=x[:, :, 1:]),
    "out= of a new tensor": lambda x: torch.add(x[:, :, 1:], 1, out=torch.empty_like(x[:, :, 1:])),
    "many": lambda x: torch._foreach_add_([x, x[:, :1] * 1], 2),
}


def stale(
    x: Tensor,
    other: Callable[[Tensor], Any],
    read: Callable[[Tensor], Any] = lambda rows: rows + 1,
    rows: Callable[[Tensor], Tensor] = lambda x: x[:, :, 1:],
) -> Any:
    view = rows(x)
    other(x)
    return read(view)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "read after a change": lambda x: stale(x, lambda x: x.add_(1)),
    "read after a change of other rows": lambda x: stale(x, lambda x: x[:, :, :2].add_(1)),
    "read by operators of one tensor": lambda x: stale(x, lambda x: x.add_(1), torch.exp),
    "cloned after a change": lambda x: stale(x, lambda x: x.add_(1), torch.clone),
    "summed after a change": lambda x: stale(x, lambda x: x.mul_(2), torch.sum),
    "overlapping parts": lambda x: torch._foreach_mul_([x[:, :, 1:], x[:, :, :2]], 2),
    "written after a change": lambda x: [rows.add_(1) for rows in (x[:, :, 1:], x[:, :, :2])],
    "one of many": lambda x: torch._foreach_add_([x[:, :1], x[:, :, 1:]], 2),
    "rows of rows read after a change": lambda x: stale(x, lambda x: x.add_(1), rows=lambda x: x[:, :, 1:][:, :, 1:5]),
    "rows of windows": lambda x: x.unfold(2, 2, 2)[:, :, 0].zero_(),
}
"""In one process views see what becomes of their tensor; here copies would not."""


def outcome(operation: Callable[[Tensor], Any], x: Tensor) -> Tensor | str:
    """What x is afterwards, or the error."""
    try:
        operation(x)
    except (distconv.UnsupportedOperation, RuntimeError) as error:
        return str(error)
    return distconv.gather(x)


def differences(partition: str) -> list[str]:
    """Operations that neither do what they do in one process nor are refused as they should be."""
    mesh = distconv.init(partition, device_type="cpu")
    plain = torch.rand(2, 3, 7, 6, dtype=torch.float64) - 0.3
    wrong = []
    for grad, mode in (
        (True, contextlib.nullcontext),
        (False, contextlib.nullcontext),
        (True, torch.no_grad),
        (False, torch.inference_mode),
    ):
        with mode():
            for name, operation in CHANGED.items():
                alone = plain * torch.ones((), requires_grad=grad)
                here = distconv.shard(plain.clone(), mesh) * torch.ones((), requires_grad=grad)
                expected, found = outcome(operation, alone), outcome(operation, here)
                both = isinstance(found, Tensor) and isinstance(expected, Tensor)
                if not (torch.allclose(found, expected) if both else found == expected):  # type: ignore[arg-type]
                    wrong.append(f"{name} in {mode.__name__}, grad {grad}: {found}")
    return wrong


@pytest.mark.parametrize("size, partition", [(2, "height=2"), (4, "height=4"), (4, "height=2,width=2")])
def test_changes_are_those_of_one_process(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    for wrong in ranks(size).run(differences, partition):
        assert not wrong


def refusals(partition: str) -> dict[str, str]:
    mesh = distconv.init(partition, device_type="cpu")
    return {
        name: str(outcome(operation, distconv.shard(torch.rand(2, 3, 7, 6), mesh)))
        for name, operation in REFUSED.items()
    }


def test_all_ranks_refuse(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4).run(refusals, "height=4")
    assert all(answer == answers[0] for answer in answers)
    assert not [name for name, error in answers[0].items() if "in one process is a view" not in error]


MADE_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: stale(x, lambda x: x.add_(1)),
    "a function": lambda x: stale(x, lambda x: x.mul_(2), torch.exp),
    "beside each other": lambda x: stale(x, lambda x: F.relu(x, inplace=True), lambda rows: torch.cat([rows, rows], 1)),
    "rows of rows": lambda x: stale(x, lambda x: x.add_(1), rows=lambda x: x[:, :, 1:][:, :, 1:5]),
    "dims in another order": lambda x: stale(x, lambda x: x[:, 0].fill_(1), rows=lambda x: x.transpose(1, 2)[:, 1:]),
}
"""Slices that are read after their tensor has changed, in a model: refused there too."""

UNTOUCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of rows": lambda x: stale(x * 1, lambda x: x[:, :, 1].fill_(1), rows=lambda x: x[:, :, 1:][:, :, 2:]),
    "rows": lambda x: stale(x * 1, lambda x: x[:, :, 0].fill_(1)),
}
"""Slices of which nothing has changed: they are read."""


class On(nn.Module):
    """A function of what a model has computed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function((x * self.scale).clone())


def read_in_models(partition: str) -> tuple[list[str], dict[str, Any]]:
    """The cases that are not refused, and errors of those that need not be."""
    mesh = distconv.init(partition, device_type="cpu")
    x, read = torch.rand(2, 3, 7, 6, dtype=torch.float64), []
    for name, function in MADE_BEFORE.items():
        model = distconv.parallelize(On(function), mesh)
        with contextlib.suppress(distconv.UnsupportedOperation):
            read.append(f"{name}: {distconv.gather(model(distconv.shard(x, mesh))).sum()}")
    return read, differing(UNTOUCHED, partition, (2, 3, 7, 6))


def test_models_read_no_slices_from_before_a_change(ranks: Callable[[int], Ranks]) -> None:
    for read, errors in ranks(4).run(read_in_models, "channel=2,height=2"):
        assert not read
        assert not errors


def changed_on_the_way(x: Tensor) -> Tensor:
    y = x * 1
    y[:, :, 0] = y[:, :, -1] * 2
    y[..., 1:] = y[..., :-1] * 3
    y.flatten(1).mul_(2)
    F.relu(y[:, :, 2:], inplace=True)
    return y


def written_gradients(partition: str) -> dict[str, Any]:
    """Gradients of what was changed by parts, and formulas of backward that write to a part of a gradient."""
    table = {"changed": changed_on_the_way, "spectrum": lambda x: torch.fft.irfft(x, dim=2)}
    return differing(table, partition, (2, 3, 7, 6))


@pytest.mark.parametrize("partition", ["height=4", "height=2,width=2"])
def test_gradients_of_what_was_changed(ranks: Callable[[int], Ranks], partition: str) -> None:
    for wrong in ranks(4).run(written_gradients, partition):
        assert not wrong


def gradients(partition: str) -> list[float]:
    """Gradients that arrive as slices of another, and add up in place, are nobody's views."""
    mesh = distconv.init(partition, device_type="cpu")
    plain = torch.rand(2, 3, 7, 6, dtype=torch.float64)
    found = []
    for x in (plain.clone().requires_grad_(), distconv.shard(plain, mesh).detach().requires_grad_()):
        for _ in range(2):
            torch.cat([x, x[:, :, 1:]], 2).square().sum().backward()
        x.grad.mul_(2)  # type: ignore[union-attr]
        found.append(distconv.gather(x.grad))
    return [float((found[0] - found[1]).abs().max())]


def test_gradients_may_be_changed(ranks: Callable[[int], Ranks]) -> None:
    for (error,) in ranks(4).run(gradients, "height=4"):
        assert error < 1e-12
