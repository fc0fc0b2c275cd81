"""Convolutions of more than 2^31 elements: what torch does with them, and that mucudnn gives cuDNN no such tensor.

By what is allocated: torch's dispatch and cuDNN's plans are real, and nothing is computed. Small tensors that count as
too large show that the parts give the right numbers.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mucudnn
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers import providers_on
from mucudnn.providers.cudnn import form
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.stock import Stock
from mucudnn.timing.measurement import Measurement

GIB = 2**30
LARGE = Path(__file__).with_name("large.py")
X, SMALLER_X, W = (1, 64, 362, 370, 251), (1, 64, 361, 370, 251), (32, 64, 3, 3, 3)
"""Of https://github.com/pytorch/pytorch/issues/95024; the smaller one has less than 2^31 elements."""


def large(direction: str, x: tuple[int, ...], *options: str, **environment: str) -> Any:
    """What large.py tells of a convolution."""
    nothing = {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0", **environment}
    command = [sys.executable, str(LARGE), direction, json.dumps(x), json.dumps(W), "--padding", "1", *options]
    printed = subprocess.run(command, env={**os.environ, **nothing}, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(printed.stdout)


@pytest.mark.usefixtures("card")
def test_before_cudnn_9_3_torch_makes_columns() -> None:
    old = {"NULL_CARD_CUDNN_VERSION": "90200"}
    fits, columns = large("forward", SMALLER_X, **old), large("forward", X, **old)
    assert fits["backend"] == "Cudnn" and "error" not in fits
    assert columns["backend"] == "SlowDilated3d"
    assert "Tried to allocate 108.21 GiB" in columns["error"], "27 copies of the input"


@pytest.mark.usefixtures("card")
def test_with_this_cudnn_torch_takes_as_much_as_for_less() -> None:
    fits, more = large("forward", SMALLER_X), large("forward", X)
    assert fits["backend"] == more["backend"] == "Cudnn"
    assert 5 * GIB < fits["beside"] < more["beside"] < 1.01 * fits["beside"]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("limit", ["256MiB", "1GiB"])
@pytest.mark.parametrize("direction", Direction)
def test_tiles_keep_the_limit_and_cudnns_numbers(direction: str, limit: str) -> None:
    told = large(direction, X, "--limit", limit)
    ((dim, parts, workspace),) = told["plans"]
    allowed = {"256MiB": GIB // 4, "1GiB": GIB}[limit]
    assert parts[0][1] != "stock", "torch's own kernel was made to look slow"
    assert dim == "depth" and sum(size for size, _ in parts) == X[2]
    assert told["beside"] <= workspace + 64 * 1024 and workspace <= allowed
    rows = max(size for size, _ in parts) + 2  # and what the kernel reaches beyond them
    assert rows * X[1] * math.prod(X[3:]) < 2**31


@pytest.mark.usefixtures("card")
def test_a_kernel_of_torchs_that_counts_makes_room_for_tiles() -> None:
    told = large("forward", X, "--limit", "1GiB", "--count-stock")
    ((dim, parts, workspace),) = told["plans"]
    assert dim == "depth" and len(parts) > 1
    assert told["beside"] <= workspace + 64 * 1024 and workspace <= GIB


@pytest.fixture
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ConvProblem]]:
    """Makes cuDNN take tensors of `MOST` elements at most, and torch's own kernel look slow; what cuDNN was given."""
    given: list[ConvProblem] = []
    prepared = Engines.prepared

    def watched(self: Engines, problem: ConvProblem, *others: Any) -> Any:
        given.append(problem)
        return prepared(self, problem, *others)

    laps = TrialRunner.laps

    def slow(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        return [1e3] if trial.division is None else laps(runner, trial, given)

    monkeypatch.setattr(form, "MOST_ELEMENTS", MOST)
    monkeypatch.setattr(TrialRunner, "laps", slow)
    monkeypatch.setattr(Engines, "prepared", watched)
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)
    monkeypatch.setattr(Stock, "algorithms", lambda self, problem: ())
    precision = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    for cached in (form.form, providers_on):
        cached.cache_clear()
    yield given
    for cached in (form.form, providers_on):
        cached.cache_clear()
    torch.backends.cudnn.conv.fp32_precision = precision


MOST = 4500
Layer = Callable[[], torch.nn.Module]
LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "volume": (lambda: torch.nn.Conv3d(4, 6, 3, padding=1), (2, 4, 16, 9, 10)),
    "strided": (lambda: torch.nn.Conv3d(4, 6, 3, stride=2, padding=1), (1, 4, 24, 11, 10)),
    "transposed": (lambda: torch.nn.ConvTranspose3d(6, 4, 2, stride=2), (1, 6, 8, 6, 7)),
    "picture": (lambda: torch.nn.Conv2d(4, 6, 5, padding=2), (1, 4, 32, 41)),
    "odd": (lambda: torch.nn.Conv3d(4, 6, 3, padding=1), (1, 4, 27, 9, 10)),
}
"""Layers, and the shapes of inputs of which a sample is too large. Torch's own kernel, which would compute a rest where
tiles of one size do not compute the whole, is left out here."""


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_tiles_give_the_right_numbers(name: str, dtype: torch.dtype, all_is_large: list[ConvProblem]) -> None:
    assert len(divisions(name, dtype, "64MiB")) == 3
    assert largest(all_is_large) <= MOST


@pytest.mark.usefixtures("card")
def test_tiles_along_two_dims_give_the_right_numbers(all_is_large: list[ConvProblem]) -> None:
    """The limit is less than a plane of all samples takes. A gradient of the weight may have no plans left to ask for
    when tiles do not fit, as its parts take two each."""
    found = divisions("volume", torch.float32, "8KiB")
    assert len(found) >= 2 and all("depth" in division and "@height" in division for division in found)
    assert largest(all_is_large) <= MOST


def largest(problems: list[ConvProblem]) -> int:
    """Elements of the largest tensor."""
    return max(math.prod(s) for problem in problems for s in (problem.x_shape, problem.w_shape, problem.y_shape))


def divisions(name: str, dtype: torch.dtype, limit: str) -> list[str]:
    """Those of forward and backward of a layer, whose results are compared with float64 on the host."""
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    exact, x = build().to(dtype).double(), torch.randn(shape).to(dtype)
    layer, there = build().to("cuda", dtype), x.cuda().requires_grad_()
    layer.load_state_dict(exact.state_dict())
    here = x.double().requires_grad_()
    expected = exact(here)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient.double())
    with mucudnn.patched(workspace_limit=limit, database=":memory:", progress="off", check="off"):
        found = layer(there)
        found.backward(gradient.cuda())
        records = mucudnn.report()
    assert len(records) == 3 and all(record.workspace <= record.limit for record in records)
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for mine, its in ((found, expected), (there.grad, here.grad), (layer.weight.grad, exact.weight.grad)):
        assert (mine.double().cpu() - its).norm() < bound * its.norm()
    return [record.division for record in records if record.parts[0][1] != "stock"]
