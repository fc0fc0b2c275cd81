"""What is predicted of all parts from one of them is what following all of them finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import NETWORKS
from distconv import settings
from distconv.settings.partition import Partition
from distconv.turns import one_part
from distconv.turns.following import follow_call
from distconv.turns.one_part import parts_within, record_part
from distconv.turns.part_recorder import NoSlice, PartRecorder
from distconv.turns.simulation import simulate
from distconv.turns.tape import (
    LEAST,
    SMALL,
    Begun,
    Ended,
    Event,
    Freed,
    Joined,
    Once,
    Ran,
    Released,
    Section,
    Tape,
    Waited,
)

BIG = 4 * LEAST


def tape_of(parts: int, *sections: tuple[bool, list[Event]]) -> Tape:
    tape = Tape((parts,), (parts,), [Section(*each) for each in sections])
    for event in (event for _, events in sections for event in events):
        for made, size in event.made if isinstance(event, Ran) else ():
            tape.bytes[made] = size
    return tape


def operator(made: int, *reads: int) -> list[Event]:
    return [Begun(reads, False), Ran(((made, BIG),), 0), Ended((made,))]


def test_parts_that_never_wait_run_one_after_another() -> None:
    tape = tape_of(3, (True, [*operator(0), *operator(1, 0), Freed(0), Freed(1)]))
    assert simulate(tape, 1 << 40).peak == 2 * BIG


def test_small_tensors_leave_within_a_small_limit_alone() -> None:
    made = range(SMALL // LEAST + 8)
    tape = tape_of(1, (True, [each for n in made for each in (Begun((), False), Ran(((n, LEAST),), 0), Ended((n,)))]))
    assert (simulate(tape, SMALL - 1).spilled > 0, simulate(tape, SMALL).spilled) == (True, 0)


def test_what_all_parts_wait_for_keeps_what_each_has() -> None:
    join: list[Event] = [Joined(0, "all_reduce", (0,), (0,), ()), Waited(0)]
    tape = tape_of(3, (True, [*operator(0), *join, Freed(0)]))
    assert simulate(tape, 1 << 40).peak == 5 * BIG  # Three inputs, and two sums of which one is being made.


def test_rows_that_a_neighbour_has_not_taken_are_copied() -> None:
    join = Joined(0, "all_to_all_single", (0,), (0,), (1,), ((-1, LEAST), (1, LEAST)), (-1, 1))
    tape = tape_of(3, (True, [*operator(0), *operator(1), join, Waited(0), Freed(0), Freed(1)]))
    # Parts 0 and 1 have met; 0 goes on, and ends; then part 2 begins, and 1 had its own rows there all the time.
    assert simulate(tape, 1 << 40).peak == 4 * BIG


def test_rows_are_copied_where_only_one_side_waits() -> None:
    join = Joined(0, "all_to_all_single", (0,), (0,), (1,), ((1, LEAST),), (-1,))
    events = [*operator(0), *operator(1), join, Waited(0), Freed(0), Freed(1)]
    assert simulate(tape_of(3, (True, events)), 1 << 40).peak == 2 * BIG + LEAST  # Part 0's rows wait for part 1.
    assert simulate(tape_of(2, (True, events)), 1 << 40).peak == 4 * BIG  # Of two, each waits for the other.


def test_what_was_not_read_for_longest_leaves_and_comes_back() -> None:
    events = [*operator(0), *operator(1), *operator(2), Begun((0,), False), Ended(())]
    taken = simulate(tape_of(1, (True, events)), 2 * BIG)
    assert (taken.peak, taken.spilled, taken.fetched) == (3 * BIG, 2 * BIG, BIG)


def test_what_the_caller_gets_returns_to_the_device() -> None:
    made = [event for number in range(4) for event in operator(number)]
    tape = tape_of(1, (True, made), (False, [Released(number) for number in range(4)]))
    assert simulate(tape, BIG).peak == 4 * BIG


def test_what_is_done_once_is_made_by_the_first_part_and_freed_by_the_last() -> None:
    block = Once(0, operator(0))
    tape = tape_of(3, (True, [block, *operator(1), Freed(1), Freed(0)]))
    tape.bytes[0] = BIG
    tape.common.add(0)
    assert simulate(tape, 1 << 40).peak == 2 * BIG


def test_what_is_freed_while_something_is_done_once_is_freed_by_the_part_that_does_it() -> None:
    block = Once(0, [*operator(0), *operator(2, 0), Freed(0)])
    tape = tape_of(3, (True, [block, *operator(1), Freed(1), Freed(2)]))
    tape.bytes |= {0: BIG, 2: BIG}
    tape.common |= {0, 2}
    assert simulate(tape, 1 << 40).peak == 2 * BIG


class Attention(nn.Module):
    """Attention among all positions: keys and values are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Linear(16, 48)
        self.register_buffer("scale", torch.ones(64, 64, 3))  # of which parts have copies

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)) * self.scale.mean()
        q, k, v = self.inner(y.flatten(2).transpose(1, 2)).chunk(3, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(y.shape) + y


class Bounded(nn.Module):
    """Computes something whole once for all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 8 * 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        pooled = nn.functional.adaptive_avg_pool2d(y, 4).flatten(1)
        return y * self.last(pooled).mean()


class Again(nn.Module):
    """A residual block that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, stride=2, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y + checkpoint(self.block, y, use_reentrant=False))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, bool]] = {
    "a volume's training step": (lambda: NETWORKS["unet3d"].small().build(), (1, 1, 32, 32, 32), "depth=4", True),
    "a residual network's": (lambda: NETWORKS["resnet18"].small().build(), (2, 3, 128, 128), "height=4", True),
    "two axes": (lambda: NETWORKS["resnet18"].small().build(), (2, 3, 128, 128), "sample=2,height=3", True),
    "inference": (lambda: NETWORKS["unet3d"].small().build(), (1, 1, 32, 32, 32), "depth=4,height=2", False),
    "attention": (Attention, (1, 3, 48, 48), "height=4", True),
    "a block computed again": (Again, (2, 3, 128, 96), "height=4", True),
    "a whole head": (Bounded, (2, 3, 96, 96), "height=4", True),
}


@pytest.mark.parametrize("name", CASES)
def test_one_part_shows_what_all_take(name: str) -> None:
    build, shape, text, backward = CASES[name]
    torch.manual_seed(0)
    model, x, partition = build().double(), torch.randn(shape).double(), Partition.parse(text)
    with torch.set_grad_enabled(backward):
        tape = record_part(model, (x,), {}, partition, backward)
        for limit in (1 << 40, 1 << 20):
            one, all_of = simulate(tape, limit), follow_call(model, (x,), {}, partition, limit, backward)
            assert one.with_scratch == pytest.approx(all_of.with_scratch, rel=0.06, abs=1 << 16)
            assert one.peak == pytest.approx(all_of.peak, rel=0.06, abs=1 << 16)
            assert one.moved == pytest.approx(all_of.moved, rel=0.15, abs=1 << 18)
            # Parts at an edge fetch less, and copies of messages between parts are not recorded.
            for of_one, of_all, near in zip(astuple(one.work), astuple(all_of.work), (0.15, 0.4, 0.25), strict=True):
                assert of_one == pytest.approx(of_all, rel=near)
            assert (one.whole, one.results) == (all_of.whole, all_of.results)


@pytest.mark.parametrize("name", CASES)
def test_of_a_shorter_tape_the_same_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, text, backward = CASES[name]
    model, x = build().double(), torch.randn(shape).double()
    with torch.set_grad_enabled(backward):
        shorter = record_part(model, (x,), {}, Partition.parse(text), backward)
        monkeypatch.setattr(PartRecorder, "_summed", lambda self, events: events)
        tape = record_part(model, (x,), {}, Partition.parse(text), backward)
    events, of_shorter = (sum(len(section.events) for section in each.sections) for each in (tape, shorter))
    assert of_shorter < events
    for limit in (1 << 40, 1 << 22, 1 << 20, 1 << 18, 0):
        assert simulate(shorter, limit) == simulate(tape, limit)


def test_parts_of_ranks() -> None:
    model, x = NETWORKS["unet3d"].small().build().float(), torch.randn(2, 1, 32, 32, 32).float()
    parts, ranks = Partition.parse("depth=4"), Partition.parse("sample=2,depth=2")
    one = simulate(record_part(model, (x,), {}, parts, True, ranks), 1 << 20)
    all_of = follow_call(model, (x,), {}, parts, 1 << 20, True, ranks)
    assert one.with_scratch == pytest.approx(all_of.with_scratch, rel=0.06)


@pytest.mark.parametrize("why", ["no slice of the mesh", "chains"])
def test_where_one_part_is_not_enough_all_are_followed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, partition = (
        nn.Conv2d(1, 4, 3, padding=1).float(),
        torch.randn(1, 1, 64, 64).float(),
        Partition.parse("height=2"),
    )

    def refuse(*_: Any) -> None:
        raise NoSlice

    with torch.no_grad(), settings.within_call({"halo": "chain"} if why == "chains" else {}):
        right = follow_call(model, (x,), {}, partition, 1 << 20, False)
        monkeypatch.setattr(one_part, "simulate" if why == "chains" else "record_part", refuse)
        assert parts_within(model, (x,), {}, partition, False)(1 << 20) == right
