"""Deferred tensors: their parts, their whole, and what becomes of them when they are changed, are those of torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distconv.tensors import deferred as module
from distconv.tensors import hooks, plain_tensors
from distconv.tensors.deferred import Deferred, begins, deferred

N = 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deferred may be as small as in these tests."""
    monkeypatch.setattr(module, "LEAST", N)
    monkeypatch.setattr(module, "SHARE", 2)


def positions() -> tuple[Tensor, Tensor]:
    index = torch.arange(N).repeat_interleave(2)[:N]
    x, y = torch.meshgrid(index, index, indexing="xy")
    return x, y


def mask(is_deferred: bool) -> Tensor:
    x, y = positions()
    if not is_deferred:
        return x <= y
    found = deferred(torch.ops.aten.le.Tensor, (x, y), {})
    assert found is not None
    return found


DEFERRED: dict[str, Callable[[Tensor], Tensor]] = {
    "a comparison": lambda m: m,
    "values": lambda m: torch.where(m, 0, -math.inf).to(torch.float64),
    "heads": lambda m: m.float().unsqueeze(0).expand(2, -1, -1).repeat_interleave(3, dim=0).view(2, 3, -1, N),
    "rows": lambda m: (~m)[3:9],
    "dims": lambda m: m[None, None].permute(0, 2, 3, 1)[0, :, 4:, 0],
    "a row": lambda m: m[5],
    "arithmetic": lambda m: m.float().mul(2).masked_fill(m, 7.0).T,
    "beside small tensors": lambda m: m & (torch.arange(N) > 3),
}
AT_ONCE: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda m: m.float().sum(0),
    "a concatenation": lambda m: torch.cat([m, m]),
    "every other row": lambda m: m[::2] * 1,
    "a large tensor": lambda m: torch.ones(N, N) + m,
    "numbers of Python": lambda m: torch.tensor(m.tolist()),
    "numbers of numpy": lambda m: torch.from_numpy(m.numpy()),
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", DEFERRED)
def test_parts_are_computed_alone(name: str, mode: Any) -> None:
    with mode():
        found, right = DEFERRED[name](mask(True)), DEFERRED[name](mask(False))
        assert type(found) is Deferred
        assert (found.shape, found.dtype, found.stride()) == (right.shape, right.dtype, right.stride())
        box = tuple((n // 3, n - n // 4) for n in right.shape)
        part = found.part(box)
        assert type(part) is Tensor and found._made is None
        torch.testing.assert_close(part, right[tuple(slice(*interval) for interval in box)])
        torch.testing.assert_close(found.whole(), right)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", AT_ONCE)
def test_other_operators_are_given_all_of_it(name: str, mode: Any) -> None:
    with mode():
        found = AT_ONCE[name](mask(True))
        assert type(found) is Tensor
        torch.testing.assert_close(found, AT_ONCE[name](mask(False)))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_changed_in_place_changes_its_views_and_nothing_else(mode: Any) -> None:
    def changed(m: Tensor) -> list[Tensor]:
        values = torch.where(m, 0.0, 1.0)
        row, rows, others = values[3], m[4:6], m[::2]
        opposite = ~rows
        table = m.view(4, 6, N)[1]
        others.fill_(True)
        middle = values[2:8]
        values.sum()
        middle.add_(1.0)
        values[0].mul_(3)
        after = values + 1
        values.view(-1)[5] = 9.0
        m |= True
        return [x * 1 for x in (m, values, row, rows, others, opposite, table, middle, after)]

    with mode():
        for found, right in zip(changed(mask(True)), changed(mask(False)), strict=True):
            torch.testing.assert_close(found, right)


def test_operands_may_change_later() -> None:
    index = torch.arange(N)
    found = deferred(torch.ops.aten.ge.Tensor, (index[:, None], index[None]), {})
    index.add_(5)
    assert found is not None
    torch.testing.assert_close(found.whole(), torch.ones(N, N, dtype=torch.bool).tril())


def test_only_large_tables_of_small_plain_tensors_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = positions()
    monkeypatch.setattr(module, "SHARE", 3)  # of 8 bytes for each of N positions, and 1 for each pair
    assert begins(x, y) and begins(x[:, :1], y[:1])
    assert not begins(x, y.contiguous()) and not begins(x, torch.nn.Parameter(y.double())) and not begins(x, 3)
    monkeypatch.setattr(module, "LEAST", N * N + 1)
    assert not begins(x, y)


def test_a_gradient_is_asked_of_no_deferred_tensor() -> None:
    slope = torch.ones((), requires_grad=True)
    found = torch.where(mask(True), slope, 0.0)
    assert type(found) is not Deferred
    found.sum().backward()
    assert slope.grad == mask(False).sum()


def test_ranks_compare_what_it_is_computed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(hooks, "plain_operands", [lambda func, index, x, mesh: seen.append(x)])
    plain_tensors.entering(torch.ops.aten.add.Tensor, [mask(True), 1], None)  # type: ignore[arg-type]
    assert len(seen) == 2 and all(torch.equal(x, y) for x, y in zip(seen, positions(), strict=True))
