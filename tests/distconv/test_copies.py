"""What is a view in one process and a copy here: a change in place is refused, alike on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor

import distconv

pytestmark = pytest.mark.gloo


def added(x: Tensor, to: Tensor) -> Tensor:
    to += 1
    return x


def assigned(x: Tensor, to: Tensor, value: Any) -> Tensor:
    to[...] = value
    return x


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda x: x[:, :, 1:].add_(1),
    "of a tensor": lambda x: x[:, :, 1:].mul_(x[:, :, :-1]),
    "+=": lambda x: added(x, x[:, :, 1:]),
    "assignment": lambda x: assigned(x, x[:, :, 1:], 0.0),
    "an activation": lambda x: F.relu(x[:, :, :-1], inplace=True),
    "dropout": lambda x: F.dropout(x[:, :, 1:], inplace=True),
    "zeros": lambda x: x[:, :, ::2].zero_(),
    "random numbers": lambda x: x[:, :, 1:].normal_(),
    "rows that stay on most ranks": lambda x: x[:, :, :6].clamp_(0, 1),
    "one row": lambda x: x[:, :, 0].sub_(1),
    "rows by turns": lambda x: x.unbind(2)[1].sqrt_(),
    "a part": lambda x: x.split([3, x.shape[2] - 3], 2)[1].abs_(),
    "a view of rows": lambda x: x[:, :, 1:].transpose(0, 1)[1].neg_(),
    "rows without gradient": lambda x: x[:, :, 1:].detach().exp_(),
    "a flat view": lambda x: x.flatten(1).sin_(),
    "out=": lambda x: torch.add(x[:, :, 1:] * 1, 1, out=x[:, :, 1:]),
    "one of many": lambda x: torch._foreach_add_([x[:, :1], x[:, :, 1:]], 2),
}

CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.add_(1),
    "channels": lambda x: x[:, 1:].add_(1),
    "all rows": lambda x: x[:, :, :].relu_(),
    "a channel": lambda x: x[:, 1].zero_(),
    "a copy": lambda x: x[:, :, 1:].clone().add_(1),
    "a result": lambda x: F.relu(x[:, :, 1:] * 2, inplace=True).abs_(),
    "out=": lambda x: torch.add(x[:, :, 1:], 1, out=torch.empty_like(x[:, :, 1:])),
    "many": lambda x: torch._foreach_add_([x, x[:, :1]], 2),
}


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
            for name, operation in (REFUSED | CHANGED).items():
                alone = plain * torch.ones((), requires_grad=grad)
                here = distconv.shard(plain.clone(), mesh) * torch.ones((), requires_grad=grad)
                expected, found = outcome(operation, alone), outcome(operation, here)
                if isinstance(found, Tensor):
                    right = isinstance(expected, Tensor) and torch.allclose(found, expected)
                else:
                    right = found == expected or (name in REFUSED and "in one process is a view" in found)
                    right &= torch.equal(distconv.gather(here), plain)
                if not right:
                    wrong.append(f"{name} in {mode.__name__}, grad {grad}: {found}")
    return wrong


@pytest.mark.parametrize("size, partition", [(2, "height=2"), (4, "height=4"), (4, "height=2,width=2")])
def test_changes_are_those_of_one_process_or_refused(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    for wrong in ranks(size).run(differences, partition):
        assert not wrong


def refusals(partition: str) -> dict[str, str]:
    x = distconv.shard(torch.rand(2, 3, 7, 6), distconv.init(partition, device_type="cpu"))
    return {name: str(outcome(operation, x)) for name, operation in REFUSED.items()}


def test_all_ranks_refuse_alike(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4).run(refusals, "height=4")
    assert all(answer == answers[0] for answer in answers)
    assert not [name for name, error in answers[0].items() if "in one process is a view" not in error]


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
