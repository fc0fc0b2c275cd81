"""Every refusal is one line: the operator, the shapes of whole tensors, layouts in words, the line, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_tensors import gathered_up_to
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import distconv
from distconv.tensors.refusal import in_words, placements_in_words

pytestmark = pytest.mark.gloo


def rolled(x: Tensor) -> Tensor:
    """A roll of all elements as of one row."""
    return x.roll(1)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a roll without dims": rolled,
    "a sparse tensor": lambda x: x.detach().to_sparse(),
    "numbers": lambda x: x.detach().numpy(),
}


class Layer(nn.Module):
    """A model whose backward asks for what no rule does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return _BackwardRefused.apply(y) + 1


class _BackwardRefused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1  # the line that the refusal tells

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rolled(grad).sum().expand_as(grad)


def refusals() -> dict[str, Any]:
    mesh = distconv.init("height=2", device_type="cpu")
    x = distconv.shard(torch.randn(2, 4, 8, 8), mesh)
    found: dict[str, Any] = {}
    for name, attempt in CALLS.items():
        try:
            with gathered_up_to(0):
                attempt(x)
        except distconv.UnsupportedOperation as error:
            found[name] = str(error)
    model = distconv.parallelize(Layer(), mesh)
    try:
        model(x).square().sum().backward()
    except distconv.UnsupportedOperation as error:
        found["backward"] = str(error)
    return found


def test_every_refusal_names_operator_shapes_layout_line_and_what_to_do(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refusals)
    assert first == second
    assert first.keys() == {*CALLS, "backward"}
    for name, message in first.items():
        assert "\n" not in message, message
        assert re.match(r"(aten\.|DTensor\.)\w+", message), name
        assert re.search(r"\(\d+(, \d+)*,?\) \[[^\]]*height over 2 ranks\]", message), message
        assert not re.search(r"Shard\(|Replicate\(|Partial\(", message), message
        assert re.search(r"accepted|\b[uU]se ", message), message
        assert re.search(r"test_refusals\.py:\d+", message), message


def test_a_refusal_in_backward_names_the_line_of_its_forward(ranks: Callable[[int], Ranks]) -> None:
    message = ranks(2).run(refusals)[0]["backward"]
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the line that the refusal tells" in text)
    assert re.search(rf"in the backward \(\w+\) of the operator at \S*test_refusals\.py:{line}\b", message), message


def shown() -> tuple[str, str]:
    mesh = distconv.init("height=2", device_type="cpu")
    x = distconv.shard(torch.randn(2, 4, 8, 8), mesh)
    found = []
    for attempt in (rolled, lambda y: y.permute(0, 1)):
        model = distconv.parallelize(nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), _Last(attempt))), mesh)
        try:
            model(x)
        except Exception as error:
            found.append("".join(traceback.format_exception(error)))
    return found[0], found[1]


class _Last(nn.Module):
    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(x)


def test_what_fails_inside_a_model_shows_the_programs_frames(ranks: Callable[[int], Ranks]) -> None:
    refused, failed = ranks(2).run(shown)[0]
    for text in (refused, failed):
        assert "in shown" in text and "in forward" in text
        assert "calls.py" not in text and "_call_impl" not in text
    assert "/distconv/rules/" not in refused and "/torch/" not in refused


class _Mesh:
    """What a layout in words asks of a mesh."""

    mesh_dim_names = ("sample", "height", "width")
    ndim = 3

    def size(self, axis: int) -> int:
        return (1, 2, 4)[axis]


def test_layouts_in_words() -> None:
    mesh: Any = _Mesh()
    assert (
        in_words([Shard(0), Shard(2), Shard(3)], mesh) == "[dim 2 by height over 2 ranks, dim 3 by width over 4 ranks]"
    )
    assert in_words([Shard(0), Replicate(), Partial()], mesh) == "[a partial sum by width over 4 ranks]"
    assert in_words([Replicate()] * 3, mesh) == "[whole]"
    text = f"its input is {(Replicate(), Shard(-1), Partial('max'))}; accepted: {[Replicate()] * 3}"
    told = "its input is [dim -1 by height over 2 ranks, a partial sum by width over 4 ranks]; accepted: [whole]"
    assert placements_in_words(text, mesh) == told
    assert placements_in_words("dims (2, 3) of (4, 4)", mesh) == "dims (2, 3) of (4, 4)"
