"""The parts that are chosen where nobody named them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv
from distconv import settings
from distconv.__main__ import main
from distconv.model.direct.chains.choice import Prices
from distconv.model.halos import PRICES
from distconv.settings.partition import Partition
from distconv.turns import automatic, choosing, turning
from distconv.turns.call import call_in_turn
from distconv.turns.choosing import PartsChoice, choose_parts
from distconv.turns.following import Followed

MIB = 1 << 20


class Call:
    """Takes 100 MiB, divided by the parts, but no less than an operator needs; and moves some for each number of parts.

    Parameters, inputs and results are 5 MiB more.
    """

    def __init__(
        self, moved: Callable[[int], float] = lambda parts: 0.0, least: float = 0.0, in_chains: Followed | None = None
    ) -> None:
        self.moved, self.least, self.in_chains, self.asked = moved, least, in_chains, list[str]()

    def taken(self, parts: int) -> Followed:
        held = int(max(100 / parts, self.least) * MIB)
        return Followed(held + 5 * MIB, 3 * MIB, 2 * MIB, int(self.moved(parts) * MIB), 0, parts, operations=1000)

    def follow(self, partition: Partition, chained: bool) -> Followed:
        self.asked.append(f"{partition} in chains" if chained else str(partition))
        if chained:
            assert self.in_chains is not None
            return self.in_chains
        return self.taken(partition.ranks)

    def choose(self, memory: int, **extents: int) -> PartsChoice:
        prices = None if self.in_chains is None else Prices(exchange=1, received=2, operation=3, written=1)
        return choose_parts(self.taken(1), self.follow, extents, memory * MIB, prices)


def test_one_process_does_what_fits() -> None:
    choice = (call := Call()).choose(100, height=64, width=64)
    assert (choice.partition, choice.fits, call.asked) == (None, True, [])


def test_the_fewest_parts_of_the_longest_dim_that_fit_without_moves() -> None:
    choice = (call := Call()).choose(30, height=64, width=96)
    assert (str(choice.partition), choice.fits, call.asked) == ("width=4", True, ["width=2", "width=4"])


def test_samples_are_cut_first_and_space_where_they_do_not_suffice() -> None:
    assert str(Call().choose(30, sample=4, height=64).partition) == "sample=4"
    assert str(Call().choose(20, sample=3, height=64).partition) == "height=8"
    assert str(Call().choose(7, sample=3, height=5).partition) == "sample=3,height=5"


def test_more_parts_while_they_move_less() -> None:
    call = Call(moved=lambda parts: 50 if parts < 4 else 20 if parts < 8 else 19.5)
    assert str(call.choose(60, height=64).partition) == "height=8"
    assert call.asked[-1] == "height=8"


@pytest.mark.parametrize(
    "held, moved, operations, chained",
    [
        (20, 20 * MIB - 600, 1300, True),  # 1,200 seconds less for moves, 900 more for operations
        (20, 20 * MIB - 600, 1500, False),
        (40, 10 * MIB, 1000, False),  # exceeds the limit
    ],
)
def test_chains_where_they_save_more_than_they_repeat(held: int, moved: int, operations: int, chained: bool) -> None:
    in_chains = Followed(held * MIB + 5 * MIB, 3 * MIB, 2 * MIB, moved, 0, 4, operations=operations)
    call = Call(moved=lambda parts: 20, in_chains=in_chains)
    choice = call.choose(30, height=64)
    assert (str(choice.partition), choice.chained, call.asked[-1]) == ("height=4", chained, "height=4 in chains")
    assert choice.taken == (in_chains if chained else call.taken(4))


def test_chains_are_not_considered_where_nothing_is_moved() -> None:
    call = Call(in_chains=Followed(0, 0))
    assert not call.choose(30, height=64).chained
    assert call.asked == ["height=2", "height=4"]


def test_what_exceeds_the_limit_least_where_nothing_fits() -> None:
    choice = (call := Call(least=20)).choose(10, height=64)
    assert (str(choice.partition), choice.fits) == ("height=8", False)
    assert call.asked[-1] == "height=16"  # as much as eight parts


@pytest.mark.parametrize(
    "memory, told, more",
    [
        ("1GiB", "One process: the tensors take", ""),
        ("44MiB", "depth=4, in turn: the tensors take", ""),
        ("2MiB", "depth=", "But no parts keep within 2 MiB besides "),
    ],
)
def test_check_tells_what_is_chosen(
    memory: str, told: str, more: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["unet3d", "--input", "1,1,32,32,32", "--parts", "auto", "--memory", memory, "--inference"]
    monkeypatch.setattr(sys, "argv", ["distconv", "check", *asked])
    monkeypatch.setattr(choosing, "MOST_PARTS", 4)  # each takes its time to follow
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(told)
    assert lines[3].startswith(more) if more else len(lines) == 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    ).double()


@pytest.mark.parametrize("memory, told", [("1GiB", "Sequential runs whole"), ("1500KiB", "Sequential runs as height=")])
def test_a_step_in_chosen_parts_is_that_of_one_process(
    memory: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = net()
    model = distconv.in_turn(copy.deepcopy(plain), "auto", memory=memory)
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    for _ in range(2):
        found = []
        for each in (model, plain):
            torch.manual_seed(3)
            loss = each(x).square().mean()
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in each.parameters()), *(b.double() for b in each.buffers())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"distconv: --parts auto: {told}")


def stacked() -> nn.Module:
    """Layers without norms, so that parts can run far by themselves."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).double()


def test_a_step_in_chosen_chains_is_that_of_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRICES, "cpu", Prices(exchange=0, received=1, operation=0, written=0))
    plain = stacked()
    model = distconv.in_turn(copy.deepcopy(plain), "auto", memory="1MiB")
    x = torch.randn(1, 3, 128, 64, dtype=torch.float64)
    used = []
    monkeypatch.setattr(
        turning, "call_in_turn", lambda *call: used.append(settings.value("halo")) or call_in_turn(*call)
    )
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)
    assert used == [math.inf, math.inf] and settings.value("halo") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and " in chains, and takes at most " in lines[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("memory", ["1GiB", "1500KiB"])
def test_what_a_checkpoint_computes_again_runs_as_it_did(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Checkpointed()
    model = distconv.in_turn(copy.deepcopy(plain), "auto", memory=memory)
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_input_that_another_model_has_made_is_followed_with_its_gradient() -> None:
    first, plain = net().eval(), net().eval()
    second = distconv.in_turn(copy.deepcopy(plain), "auto", memory="1500KiB")
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    gradients = [torch.autograd.grad(each(first(x)).square().sum(), first[0].weight)[0] for each in (second, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


def test_a_part_that_fails_is_no_model_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(module, args, kwargs, parts, *more, **also):
        if parts is None:
            return Followed(10 * MIB, MIB)
        raise RuntimeError("a fault of the parts")

    monkeypatch.setattr(automatic, "follow_call", follow)
    with pytest.raises(RuntimeError, match=r"^a fault of the parts$"):
        distconv.in_turn(net(), "auto", memory="1MiB")(torch.randn(1, 3, 8, 8, dtype=torch.float64))


def test_without_a_limit_parts_have_a_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    automatic.spare.cache_clear()
    monkeypatch.setattr(automatic, "free_here", lambda device: 100 * MIB)
    limits = []

    def choose(alone: Followed, follow: Any, extents: Any, memory: int, prices: Any) -> PartsChoice:
        limits.append(memory)
        return PartsChoice(None, alone, True)

    monkeypatch.setattr(automatic, "choose_parts", choose)
    distconv.in_turn(net(), "auto")(torch.randn(1, 3, 8, 8, dtype=torch.float64))
    automatic.spare.cache_clear()
    assert limits == [80 * MIB] and "80 MiB, of 100 MiB that are free" in capsys.readouterr().err


def test_what_is_refused_is_one_line() -> None:
    class Asks(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    model = distconv.in_turn(Asks(3, 3, 3), "auto", memory="1MiB")
    with pytest.raises(ValueError, match=r"^parts 'auto': a call of Asks cannot be followed without numbers \(.*$"):
        model(torch.randn(1, 3, 8, 8))
