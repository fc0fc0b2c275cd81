"""Parts in turn on a card: what they keep there, and the copies of what leaves it, beside what is computed."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv
from distconv.turns import pager
from distconv.turns.places import Pinned

TURNS = Path(__file__).with_name("turns.py")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("option, kept", [("--no-graph", 0), ("--graph", 5)])
def test_workspaces_are_released_unless_a_graph_may_use_one(option: str, kept: int) -> None:
    nothing = {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0"}
    done = subprocess.run(
        [sys.executable, str(TURNS), option],
        env={**os.environ, **nothing},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["workspaces"] == kept


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(2, 4, 1), *layers).double().cuda()


def x() -> torch.Tensor:
    return torch.randn(2, 2, 16, 12, dtype=torch.float64, device="cuda")


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the parameters."""
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.fixture
def limited(card: Any, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model in four parts, of whose tensors most have to leave the card."""
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    return distconv.in_turn(net(), "height=4", memory=8192)


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_read_next_comes_while_operators_run(
    grad: bool, limited: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls after the first know what that is."""
    coming: set[int] = set()
    ahead = Counter[int]()
    read, finish, begin, call = Pinned.read, Pinned.finish, pager.Pager.begin, 0

    def begun(self: pager.Pager, *args: Any) -> Any:
        found = begin(self, *args)
        ahead[call] += len(coming)
        return found

    monkeypatch.setattr(Pinned, "read", lambda self, key, to: (coming.add(id(key)), read(self, key, to)))
    monkeypatch.setattr(Pinned, "finish", lambda self, key, of: (coming.discard(id(key)), finish(self, key, of)))
    monkeypatch.setattr(pager.Pager, "begin", begun)
    plain, given = net(), x()
    for _ in range(3):
        if grad:
            for found, expected in zip(step(limited, given), step(plain, given), strict=True):
                torch.testing.assert_close(found, expected)
        else:
            with torch.no_grad():
                torch.testing.assert_close(limited(given), plain(given))
        assert not coming
        call += 1
    assert not ahead[0]
    assert ahead[1] and ahead[2]


def test_the_card_has_pieces_alone_of_inputs_and_results_on_the_host(card: Any) -> None:
    """The card never has all of either, of which each is larger than all that it has."""
    plain = nn.Sequential(nn.Conv2d(16, 2, 1), nn.ReLU(), nn.Conv2d(2, 16, 1)).double()
    turned, given = copy.deepcopy(plain).cuda(), torch.randn(1, 16, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        distconv.in_turn(turned, "height=16", results="host")(given)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = turned(given)
    assert found.device.type == "cpu" and torch.cuda.max_memory_allocated() - before < given.nbytes // 4
    torch.testing.assert_close(found, plain(given))


def test_the_gradient_of_an_input_is_where_the_input_is(limited: nn.Module) -> None:
    given = x().cpu()
    here, there = given.clone().requires_grad_(), given.clone().requires_grad_()
    limited(here).square().sum().backward()
    net().cpu()(there).square().sum().backward()
    torch.testing.assert_close(here.grad, there.grad)


def at_once(place: Pinned, block: Any, *args: Any) -> None:
    """A block is handed out while it may still be copied from or to."""
    place._free[len(block.bytes)].append(block)
    block.copied = None


def two_streams() -> None:
    """One gives a block back, and the other takes it."""
    place, streams = Pinned(), [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):
            storage = torch.ones(1 << 12, device="cuda").untyped_storage()
            block = place.write(storage, stream)
            place.finish(block, stream)
            place.read(block, storage)
            place.finish(block, stream)
            place.drop(block, storage.nbytes())


def in_turn() -> None:
    model = distconv.in_turn(net(), "height=4", memory=8192)
    step(model, x())
    step(model, x())


def nothing(*args: Any) -> None:
    pass


FAULTS: dict[str, tuple[str, Callable[..., None] | None, Callable[[], None], set[str]]] = {
    "none, streams": ("drop", None, two_streams, set()),
    "none, in turn": ("drop", None, in_turn, set()),
    "a block is dropped at once": ("drop", at_once, two_streams, {"a stream writes over what another one still reads"}),
    "a copy is not waited for": (
        "finish",
        nothing,
        in_turn,
        {
            "a stream reads what another one may not have written yet",
            "memory was freed while a stream still used it",
            "a stream writes over what another one still reads",
            "a stream writes over what another one still writes",
        },
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_copies_are_in_order(name: str, watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card finds planted faults, and no others."""
    method, fault, run, expected = FAULTS[name]
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    if fault is not None:
        monkeypatch.setattr(Pinned, method, fault)
    torch.cuda.synchronize()
    with importlib.import_module("null_card_order").collected() as faults:
        run()
        torch.cuda.synchronize()
    assert {each.splitlines()[0] for each in faults} == expected
