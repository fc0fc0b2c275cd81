"""Operators that compute in a copy of an operand, which is off the device: their results, and the memory of parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distconv
from distconv.settings.partition import Partition
from distconv.turns.following import follow_call
from distconv.turns.in_place import copied_bytes, in_place_form
from distconv.turns.one_part import record_part
from distconv.turns.pager import pager_of
from distconv.turns.simulation import simulate

aten = torch.ops.aten
X, ROW = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(3, 4), torch.linspace(-1, 1, 4, dtype=torch.float64)
OPERATORS: list[tuple[Any, Any, dict[str, Any]]] = [
    (aten.add.Tensor, (X, ROW), {"alpha": 2}),
    (aten.sub.Tensor, (X, ROW), {}),
    (aten.mul.Tensor, (X, ROW), {}),
    (aten.div.Tensor, (X, 3.0), {}),
    (aten.masked_fill.Scalar, (X, X > 1, -2.0), {}),
    (aten.clamp.default, (X, 0.7, 1.5), {}),
    (aten.clamp_min.default, (X, 1.0), {}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.hardtanh.default, (X, -1.0, 1.0), {}),
    (aten.leaky_relu.default, (X, 0.2), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    *((getattr(aten, name).default, (X,), {}) for name in ("relu", "silu", "elu", "exp", "neg", "rsqrt", "sigmoid")),
]


@pytest.mark.parametrize("func, args, kwargs", OPERATORS, ids=lambda x: str(x) if callable(x) else "")
def test_in_place_the_same_is_computed(func: Any, args: Any, kwargs: Any) -> None:
    form = in_place_form(func)
    assert copied_bytes(func, args, kwargs) == (0 if form is None else X.nbytes)
    assert (form is None) == (func is aten.pow.Tensor_Scalar)  # whose form in place has another name
    if form is not None:
        assert torch.equal(form(args[0].clone(), *args[1:], **kwargs), func(*args, **kwargs))


@pytest.mark.parametrize(
    "func, args",
    [
        (aten.mul.Tensor, (X, X)),
        (aten.mul.Tensor, (ROW, X)),
        (aten.mul.Tensor, (X.float(), X)),
        (aten.mul.Tensor, (X.long(), 2)),
        (aten.mul.Tensor, (X[1:], 2.0)),
        (aten.mul.Tensor, (X.t(), 2.0)),
        (aten.mm.default, (X, X.t())),
        (aten.eq.Scalar, (X, 1.0)),
    ],
    ids=["the same memory", "smaller", "another type", "integers", "not all", "other strides", "a product", "flags"],
)
def test_what_cannot_be_computed_in_a_copy(func: Any, args: Any) -> None:
    assert copied_bytes(func, args, {}) == 0


class Masked(nn.Module):
    """Makes a mask that every part needs whole, as shifted windows do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(256, dtype=x.dtype)
        distance = (at[:, None] - at).contiguous()
        mask = distance.masked_fill(distance != 0, -100.0).masked_fill(distance == 0, 0.0)
        weight = torch.sigmoid(mask * 0.5 + distance)
        return self.layer(x).relu() * (weight.mean() + mask.mean())


def test_a_large_mask_takes_its_memory_once() -> None:
    torch.manual_seed(0)
    model, x, limit = Masked().double(), torch.randn(1, 3, 32, 32).double(), 1 << 18
    right = model(x)
    expected = torch.autograd.grad(right.square().sum(), [*model.parameters()])
    told = follow_call(model, (x,), {}, Partition.parse("height=2"), limit, True)
    one = simulate(record_part(model, (x,), {}, Partition.parse("height=2"), True), limit)
    mask = 8 * 256**2
    assert told.limited < 2.2 * mask  # Operand and result would be there beside a flag for each element.
    assert one.peak == pytest.approx(told.peak, rel=0.06)
    turned, pager = distconv.in_turn(model, "height=2", memory=limit), pager_of("cpu")
    pager.most = pager.resident
    before, pager.read = pager.resident, 0
    y = turned(x)
    found = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    torch.testing.assert_close(y, right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-9)
    assert pager.most - before < 2.2 * mask and pager.read > 0
