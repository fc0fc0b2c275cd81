"""Parts in turn on each rank of a job: outputs, gradients, buffers and random numbers are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import distconv
from distconv import settings
from distconv.model import fully_sharded
from distconv.model.direct.chains.call import _choices_of
from distconv.settings.partition import Partition, read_parts
from distconv.tensors.mesh import make_mesh
from distconv.turns import pager
from distconv.turns.parts import parts_of
from distconv.turns.turning import script_in_turn
from tests.distconv.turns.test_in_turn import MODELS, largest, numbers

TOLERANCE = 1e-10

WAYS = {
    "norms and strides": [("height=2", "height=4"), ("sample=2", "height=3")],
    "two axes": [("width=2", "height=3"), ("height=2", "width=2,height=2")],
    "samples": [("sample=2", "sample=2")],
    "samples and rows": [("height=2", "sample=3")],
    "fewer rows than parts": [("height=2", "height=4")],
    "a decoder": [("height=2", "height=2"), ("width=2", "height=4"), ("height=2", "height=1")],
    "dropout": [("sample=2", "height=3"), ("height=2", "height=2")],
    "checkpoint": [("height=2", "width=2")],
    "reentrant checkpoint": [("height=2", "height=2")],
    "dilated circles": [("width=2", "width=2")],
    "numbers": [("sample=2", "height=2")],
    "transposed": [("height=2", "height=2")],
    "a line": [("width=2", "width=3")],
    "a volume": [("depth=2", "depth=2"), ("depth=2", "height=2")],
    "a residual network": [("sample=2", "height=4")],
}


def step(name: str, partition: str, parts: str, memory: int | None) -> tuple[float, dict[str, Tensor]]:
    """The largest error of a training step in turn on this rank, and its numbers."""
    torch.set_default_dtype(torch.float64)
    build, shape, _ = MODELS[name]
    torch.manual_seed(0)
    plain, x = build().double(), torch.randn(shape)
    turned = copy.deepcopy(plain)
    right = numbers(plain, x)
    ranks, least = make_mesh(Partition.parse(partition)), pager.least_within
    pager.least_within = lambda limit: 64  # type: ignore[assignment]
    try:
        with script_in_turn((read_parts(parts), memory), ranks=ranks):
            found = numbers(turned, x)
    finally:
        pager.least_within = least
    return largest(found, right), found


@pytest.mark.parametrize("name", WAYS)
def test_a_step_on_ranks_in_turn_is_that_of_one_process(ranks: Callable[[int], Ranks], name: str) -> None:
    for number, (partition, parts) in enumerate(WAYS[name]):
        found = ranks(2).run(step, name, partition, parts, 2048 if number else None)
        assert max(error for error, _ in found) < TOLERANCE, (partition, parts)
        (_, first), (_, second) = found
        assert all(first[what].equal(second[what]) for what in first), "the ranks have the same to the last bit"


@pytest.mark.gloo
def test_four_ranks_of_two_axes_in_turn(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(4).run(step, "norms and strides", "sample=2,height=2", "height=2", None)
    assert max(error for error, _ in found) < TOLERANCE


def chained(partition: str, parts: str) -> tuple[float, int, float]:
    """Of two steps in chains on this rank: the largest error, how many links of the model fetch more than a layer
    reads, and the bytes that parts here get in the second step beside those in the first.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())]
    plain, x = nn.Sequential(*layers, nn.GroupNorm(1, 2), *layers), torch.randn(2, 2, 24, 7)
    turned, ranks, pieces = copy.deepcopy(plain), make_mesh(Partition.parse(partition)), read_parts(parts)
    pending, errors, moved = parts_of(pieces, "cpu", ranks).pending, [], []
    with settings.options({"halo": "chain"}), script_in_turn((pieces, None), ranks=ranks):
        for _ in range(2):
            for model in (plain, turned):
                model.zero_grad()
                before = pending.moved
                model(x).square().sum().backward()
            moved.append(pending.moved - before)
            pairs = zip(turned.parameters(), plain.parameters(), strict=True)
            errors.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
    wide = sum(want is not None for choice in _choices_of(turned).values() for want in choice.wants)
    return max(errors), wide, moved[1] / moved[0]


def test_chains_on_ranks_in_turn_begin_with_the_second_call(ranks: Callable[[int], Ranks]) -> None:
    for partition, parts in (("height=2", "height=2"), ("sample=2", "height=3")):
        for error, wide, moved in ranks(2).run(chained, partition, parts):
            assert error < TOLERANCE and wide and moved != 1


class Failing(nn.Module):
    """Fails in one part, with an error of its own or with one of torch."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.conv, self.error = nn.Conv2d(1, 1, 3, padding=1), error

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.error and distributed_c10d.get_rank() == 5:
            raise {"key": KeyError, "value": ValueError, "memory": MemoryError}[self.error](f"of part 5: {self.error}")
        return y + self.conv(y)


def failures() -> list[Any]:
    """What each of three failing calls raises on this rank, and whether the next one is right."""
    torch.manual_seed(0)
    x, found = torch.randn(1, 1, 16, 8), []
    with script_in_turn((read_parts("height=4"), None), ranks=make_mesh(Partition.parse("height=2"))):
        for error in ("key", "value", "memory"):
            net = Failing(error)
            try:
                net(x)
            except Exception as raised:
                found.append((type(raised).__name__, str(raised)))
            net.error = ""
            y = net(x)
            z = nn.functional.conv2d(x, net.conv.weight, net.conv.bias, padding=1)
            z = z + nn.functional.conv2d(z, net.conv.weight, net.conv.bias, padding=1)
            found.append(bool(torch.allclose(y, z, atol=1e-6)))
    return found


def test_a_failure_in_a_part_of_one_rank_is_raised_on_all(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(failures)
    assert second == [
        ("KeyError", "'of part 5: key'"),
        True,
        ("ValueError", "of part 5: value"),
        True,
        ("MemoryError", "of part 5: memory"),
        True,
    ]
    assert first == second


class Apart(nn.Module):
    """The parts of the second rank come to another collective than those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if distributed_c10d.get_rank() < 2 else y - y.mean()


def apart() -> str:
    with script_in_turn((read_parts("height=2"), None), ranks=make_mesh(Partition.parse("height=2"))):
        try:
            Apart()(torch.zeros(1, 1, 8, 8))
        except RuntimeError as error:
            return str(error)
    return "nothing"


@pytest.mark.gloo
def test_ranks_whose_parts_wait_in_unlike_collectives_end(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(apart):
        assert "unlike collectives" in said


def shared_encoder() -> float:
    """The largest error of the gradients of two models that share a layer, and compute before either's backward."""
    torch.set_default_dtype(torch.float64)
    fully_sharded.LEAST_BYTES = 0
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 8, 3, padding=1)
    plain = nn.ModuleList(nn.Sequential(shared, nn.Conv2d(8, n, 1)) for n in (2, 4))
    turned, x, mesh = copy.deepcopy(plain), torch.randn(4, 3, 8, 6), make_mesh(Partition.parse("sample=2"))
    sum(net(x).square().sum() for net in plain).backward()  # type: ignore[union-attr]
    sharded, in_turn = settings.options({"shard_parameters": "on"}), (read_parts("height=2"), None)
    with sharded, distconv.distributed_script(mesh), script_in_turn(in_turn, ranks=mesh):
        sum(net(x).square().sum() for net in turned).backward()  # type: ignore[union-attr]
    pairs = zip(plain.parameters(), turned.parameters(), strict=True)
    return max((a.grad - distconv.gather(b.grad)).abs().max().item() for a, b in pairs)  # type: ignore[operator, arg-type]


@pytest.mark.gloo
def test_models_that_share_a_sharded_parameter_compute_before_either_has_gone_back(
    ranks: Callable[[int], Ranks],
) -> None:
    assert max(ranks(2).run(shared_encoder)) < TOLERANCE
