"""Ranks within a limit of memory whose parameters are sharded along all axes."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks as Processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv import settings
from distconv.fitting.following import followed
from distconv.fitting.models import Fitting
from distconv.fitting.ranks import Ranks
from distconv.model.direct.chains.call import PRICES
from distconv.model.fully_sharded import is_fully_sharded
from distconv.model.parallelize import distributed_script
from distconv.settings.partition import Partition
from distconv.tensors.mesh import make_mesh
from distconv.turns.turning import script_in_turn
from tests.distconv.fitting.test_fitting_ranks import Count, trained


def trained_whole(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Losses, and whole parameters and buffers, after two steps."""
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in trained([model], x)]


def within(memory: str) -> tuple[float, str]:
    """The largest error of a rank within a limit, and the line that says what was chosen."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(4)]
    model, x = nn.Sequential(nn.Conv2d(2, 64, 1), *layers), torch.randn(2, 2, 32, 24)
    expected = trained_whole(copy.deepcopy(model), x)
    ranks = Partition.parse("height=2")
    mesh, said = make_mesh(ranks), io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.redirect_stderr(said))
        around.enter_context(settings.options({"shard_parameters": "on"}))
        around.enter_context(distributed_script(mesh))
        around.enter_context(script_in_turn((Fitting(memory, Ranks(ranks, mesh)), None), ranks=mesh))
        found = trained_whole(model, x)
        assert sum(map(is_fully_sharded, model.parameters())) == len(layers)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), said.getvalue()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("memory", "how"), [("1GiB", "whole: "), ("10MiB", "whole, "), ("9MiB", "in parts sample=2 in turn")]
)
def test_numbers_are_those_of_one_process(ranks: Callable[[int], Processes], memory: str, how: str) -> None:
    (error, said), (other, nothing) = ranks(2).run(within, memory)
    assert max(error, other) < 1e-10
    assert f"Sequential runs {how}" in said and "no way fits" not in said
    assert not nothing, "the first rank chooses for all"


def peaks() -> tuple[int, int]:
    """Of a rank's step: bytes as counted, and as predicted."""
    torch.set_default_dtype(torch.float32)
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))), torch.randn(64, 512)
    ranks = Partition.parse("sample=2")
    mesh = make_mesh(ranks)
    with settings.options({"check": "off", "shard_parameters": "on"}), distributed_script(mesh):
        model(x).sum().backward()  # what is made once for all calls, and the shards
        model.zero_grad()
        local = [p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters()]
        count = Count(*local, x)
        with count:
            model(x).sum().backward()
        predicted = followed(model, (x,), {}, True, PRICES["cpu"], ranks).peak()
    return count.peak, predicted


@pytest.mark.gloo
def test_a_peak_counts_what_is_gathered(ranks: Callable[[int], Processes]) -> None:
    for counted, predicted in ranks(2).run(peaks):
        assert counted <= predicted <= 1.35 * counted
