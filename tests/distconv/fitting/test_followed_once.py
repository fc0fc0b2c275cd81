"""What a call changes that is followed, to choose how it fits a limit, is put back: it changes once, as in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import distconv

COUNT, SCALE, ELSEWHERE = torch.zeros((), dtype=torch.long), torch.ones(1 << 19), nn.Conv2d(2, 2, 1).double()
forward: Callable[[Tensor], Tensor]


def of_a_variable(norm: nn.Module) -> None:
    replaced = norm.forward
    norm.forward = lambda x: replaced(x)  # type: ignore[method-assign]


def of_a_global_variable(norm: nn.Module) -> None:
    global forward
    forward = norm.forward
    norm.forward = lambda x: forward(x)  # type: ignore[method-assign]


def of_a_default(norm: nn.Module) -> None:
    norm.forward = lambda x, replaced=norm.forward: replaced(x)  # type: ignore[method-assign]


def of_a_partial(norm: nn.Module) -> None:
    replaced = functools.partial(norm.forward)
    norm.forward = lambda x: replaced(x)  # type: ignore[method-assign]


def decorated(norm: nn.Module) -> None:
    norm.forward = torch.compiler.disable(norm.forward)  # type: ignore[method-assign]


def compiled(norm: nn.Module) -> None:
    norm.forward = torch.compile(norm.forward, backend="eager")  # type: ignore[method-assign]


def counts(norm: nn.Module) -> None:
    def count(*_: object) -> None:
        COUNT.add_(1)
        SCALE[3:] *= 0.5
        ELSEWHERE.weight.data.mul_(0.5)

    norm.register_forward_pre_hook(count)


def changed(change: Callable[[nn.Module], None], limit: str | None) -> list[Tensor]:
    """What some calls of a model have changed."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 2, 1)).double()
    with torch.no_grad():
        for x, value in ((COUNT, 0), (SCALE, 1), (ELSEWHERE.weight, 1)):
            x.fill_(value)
    change(norm)
    if limit is not None:
        model = distconv.fit(model, limit)
    for _ in range(2):
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
    elsewhere = COUNT, SCALE, ELSEWHERE.weight.detach()
    return [x.clone() for x in (*model.state_dict().values(), *elsewhere)]


CHANGES = [of_a_variable, of_a_global_variable, of_a_default, of_a_partial, decorated, compiled, counts]


@pytest.mark.parametrize("limit", ["1GiB", "40KiB"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*runs without it")
def test_what_a_followed_call_changes_changes_once(
    change: Callable[[nn.Module], None], limit: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for given, expected in zip(changed(change, limit), changed(change, None), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    assert "cannot be followed" not in capfd.readouterr().err
