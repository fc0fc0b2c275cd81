"""Tensors without numbers are those that torch makes, whether what an operator makes is remembered or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from distconv.fitting.following import followed
from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.turns import shapes_only
from distconv.turns.following import StateBefore, follow_call
from distconv.turns.shapes_only import ShapesOnly
from tests.distconv.turns.test_following import CASES

PRICES = Prices(exchange=0.0, received=1e-9, operation=5e-11, written=2e-10)


class Encoder(nn.Module):
    """Attention, changes in place, views, constants, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2).contiguous()
        y[:, 0] = torch.tensor(2.0)
        y = self.layer(y).mul_(1.5).add_(torch.arange(16.0))
        first, second = y.chunk(2, 1)
        return torch.cat([first.relu().clamp_(max=1), second + torch.rand_like(second)], 1).topk(3, dim=1)[0]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", [*CASES, "attention"])
def test_a_call_is_followed_as_torch_follows_it(name: str, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    build, shape, parts = (Encoder, (2, 16, 8, 8), "") if name == "attention" else CASES[name][:3]
    model, x = build().float().train(trained), torch.randn(shape)
    found = []
    for stock in (False, True):
        if stock:
            monkeypatch.setattr(shapes_only, "_kind_of", lambda func: shapes_only._Kind.OTHER)
        with StateBefore(model, (x,), {}).put_back(trained):
            timeline = dataclasses.asdict(followed(model, (x,), {}, trained, PRICES))
            found.append((timeline, parts and follow_call(model, (x,), {}, Partition.parse(parts), 1 << 20, trained)))
    assert found[0] == found[1]
    assert found[0][0]["seconds"]


def layouts(values: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.is_inference()) for x in values]


@pytest.mark.parametrize("infers", [True, False])
def test_what_is_remembered_is_known_by_all_that_matters(infers: bool) -> None:
    def made() -> list[Tensor]:
        results: list[Tensor] = []
        for dtype in (torch.float32, torch.float64, torch.bool):
            for x in (torch.ones(4, 6, dtype=dtype), torch.ones(6, 4, dtype=dtype).t(), torch.ones(1, 6, dtype=dtype)):
                results += [x + 1, x + 1.0, x * x, x.clone(), x.float(), x.t(), x[:, 1:3], x.contiguous(), x.sum(0)]
                results += [*x.split(2, 1), x.reshape(-1), x.expand(4, 6), x.clone().fill_(1), torch.zeros_like(x)]
        return [*results, torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)), torch.fft.rfft(torch.ones(4))]

    with torch.inference_mode(infers):
        with FakeTensorMode():
            expected = layouts(made())
        with ShapesOnly():
            assert layouts(made()) == expected
            assert layouts(made()) == expected  # remembered


def of_many_operators(x: Tensor) -> list[Tensor]:
    """Results, and gradients, of all operators whose results are made by kernels for meta tensors."""
    x = x.requires_grad_()
    functional, weight = torch.nn.functional, x.new_ones(x.shape[1]).requires_grad_()
    rows = x.reshape(x.shape[0], -1)
    activations = ("elu", "gelu", "hardswish", "hardtanh", "leaky_relu", "relu", "sigmoid", "silu", "tanh")
    made = [getattr(functional, name)(x) for name in activations]
    made += [functional.softmax(x, 1), functional.log_softmax(x, -1), functional.group_norm(x, 2, weight)]
    made += [functional.layer_norm(x, x.shape[2:]), functional.pad(x, (1, 2)), x.roll(1, 2), x.abs().sqrt().rsqrt()]
    made += [
        torch.cat([x, x], 1),
        torch.stack([x, x]),
        x[:, 1:],
        x.select(1, 0),
        x.clone(),
        x.pow(2),
        x.mean(1),
        x.sum(),
    ]
    made += [
        x.sum([2]),
        x + x,
        x * 2,
        x - x[:1],
        x / x,
        x.masked_fill(x > 0, 0.0),
        functional.normalize(x, dim=1),
        x.to(torch.float64).to(x.dtype),
        x.norm(),
        torch.addmm(rows, rows, rows.t() @ rows),
    ]
    made += [torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2))]
    compared = [
        compare(x, y) for compare in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge) for y in (0, x)
    ]
    made += [*torch.native_layer_norm(x, x.shape[2:], None, None, 1e-5)]
    made += [*torch.native_group_norm(x, weight, None, 2, 4, 24, 2, 1e-5)]
    made += torch.autograd.grad(sum(y.sum() for y in made), (x, weight))
    return [*made, *compared, x.new_empty(2), x.new_zeros(2), x.new_ones(2), x.new_full((2,), 1.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_meta_kernels_make_what_torch_makes(dtype: torch.dtype, form: torch.memory_format) -> None:
    seen = set()
    expected = layouts(of_many_operators(torch.ones(2, 4, 4, 6, dtype=dtype).contiguous(memory_format=form)))
    with ShapesOnly(lambda func, *_: seen.add(func)):
        for _ in range(2):
            x = torch.ones(2, 4, 4, 6, dtype=dtype).contiguous(memory_format=form)
            assert layouts(of_many_operators(x)) == expected
    assert not shapes_only._OF_META - seen


def test_new_tensors_of_a_given_device_take_no_memory() -> None:
    shapes = ShapesOnly()
    x = shapes.from_tensor(torch.ones(2, 3))
    with shapes:
        made = torch.ops.aten.new_empty.default(x, [1 << 40], device=torch.device("cpu"))
    assert made.device.type == "cpu" and made.untyped_storage().nbytes() == 1 << 42


def test_each_operator_is_seen_once() -> None:
    seen = []
    with ShapesOnly(lambda func, *call: seen.append(func.overloadpacket.__name__)), torch.inference_mode():
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))  # which torch takes apart
    assert [name for name in seen if name != "detach"] == ["ones", "ones", "linear"]
