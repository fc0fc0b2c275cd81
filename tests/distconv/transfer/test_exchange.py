"""Plans as pure functions over thousands of shapes; fetch, its adjoint and its bytes on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

from distconv.settings.partition import Partition, ownership
from distconv.tensors.mesh import make_mesh
from distconv.transfer import group_calls
from distconv.transfer.exchange import exchange
from distconv.transfer.needs import OWN, Need, Piece, make_exchange_plan, wanted, window

FILLED = -7


def index_map(need: Need) -> list[int]:
    return [
        FILLED if piece.start is None else piece.start + piece.step * i for piece in need for i in range(piece.length)
    ]


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...], tuple[Need, ...]]:
    extent, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 6))

    def source(start: int, step: int, count: int) -> Piece:
        room = {1: extent - start, -1: start + 1, 0: count}[step]
        return Piece(min(count, room), start, step)

    piece = st.one_of(
        st.builds(Piece, st.integers(1, 5)),
        st.builds(source, st.integers(0, extent - 1), st.sampled_from([1, 1, 1, -1, 0]), st.integers(1, 12)),
    )
    needs = draw(st.lists(st.lists(piece, max_size=4).map(tuple), min_size=ranks, max_size=ranks))
    return extent, ownership(extent, ranks), tuple(needs)


@settings(max_examples=500)
@given(exchanges())
def test_plans_agree_and_assemble_the_need(case: tuple[int, tuple[tuple[int, int], ...], tuple[Need, ...]]) -> None:
    extent, owned, needs = case
    plans = [make_exchange_plan(owned, needs, rank) for rank in range(len(owned))]
    whole = np.arange(extent)
    for rank, plan in enumerate(plans):
        for peer, other in enumerate(plans):
            start = owned[peer][0]
            sent = [(a + start, b + start) for to, (a, b) in other.sends if to == rank]
            assert sent == [interval for source, interval in plan.receives if source == peer]
        sources = {OWN: whole[slice(*owned[rank])]}
        sources |= {index: whole[slice(*interval)] for index, (_, interval) in enumerate(plan.receives)}
        assembled: list[int] = []
        for piece in plan.pieces:
            at = index_map((piece,))
            assembled += at if piece.start is None else [int(sources[piece.source][i]) for i in at]
        assert assembled == index_map(needs[rank]) and plan.extent == len(assembled)
        minimum = set(index_map(needs[rank])) - {FILLED} - set(range(*owned[rank]))
        assert sum(b - a for _, (a, b) in plan.receives) == len(minimum)
    assert {plan.silent for plan in plans} == {not any(plan.receives for plan in plans)}


@given(st.integers(1, 20), st.integers(-30, 30), st.integers(0, 60))
def test_window_is_fill_beyond_the_edge(extent: int, start: int, count: int) -> None:
    expected = [i if 0 <= i < extent else FILLED for i in range(start, start + count)]
    assert index_map(window((start, start + count), extent)) == expected


def test_wanted_merges() -> None:
    assert wanted((Piece(2, 4), Piece(3), Piece(2, 1, -1), Piece(3, 2), Piece(2, 9, 0))) == ((0, 6), (9, 10))


def test_a_source_that_nobody_owns() -> None:
    with pytest.raises(ValueError, match="position 3 is needed but no rank owns it"):
        make_exchange_plan(((0, 2), (2, 3)), ((Piece(4, 0),), ()), 0)


CASES: dict[str, tuple[int, Callable[[int, tuple[int, int]], Need]]] = {
    "halo of one": (13, lambda n, o: window((o[0] - 1, o[1] + 1), n)),
    "wider than the neighbour": (9, lambda n, o: window((o[0] - 5, o[1] + 7), n)),
    "empty shards": (3, lambda n, o: window((o[0] - 1, o[1] + 1), n) if o[0] < o[1] else ()),
    "an empty rank needs all": (3, lambda n, o: window((0, n), n)),
    "one side, strided": (16, lambda n, o: window((2 * (o[0] // 2), o[1] + 3), n)),
    "circular": (8, lambda n, o: (Piece(2, n - 2), Piece(n, 0), Piece(3, 0))),
    "reflect": (8, lambda n, o: (Piece(3, 3, -1), *window(o, n), Piece(2, n - 2, -1))),
    "replicate": (8, lambda n, o: (Piece(4, 0, 0), *window(o, n), Piece(2, n - 1, 0))),
    "nothing moves": (8, lambda n, o: (Piece(2), *window(o, n))),
}


class Answer(NamedTuple):
    fetched: list[int]
    gap: float
    """<Fx, y> - <x, F*y> over all ranks."""
    calls: int
    """Of the transport, in one fetch."""
    moved: int
    """Elements received by three fetches and two adjoints."""
    order: list[str]
    """What the adjoint in turn did: the stretches it asked for, and when it called the transport."""


def fetch_everywhere(names: list[str]) -> dict[str, Answer]:
    """What each case does on this rank; in turn it gives the same."""
    mesh = make_mesh(Partition((("height", dist.get_world_size()),)))
    moved: list[int] = []
    order: list[str] = []
    transport = group_calls.all_to_all_single

    def counting(output: torch.Tensor, input: torch.Tensor, *rest: object, **options: object) -> object:
        moved.append(output.numel())
        order.append("sent")
        return transport(output, input, *rest, **options)  # type: ignore[arg-type]

    results = {}
    group_calls.all_to_all_single = counting
    try:
        for name in names:
            extent, need = CASES[name]
            owned = ownership(extent, mesh.size(0))
            which = exchange(mesh, 0, 2, owned, tuple(need(extent, mine) for mine in owned))
            start, stop = owned[mesh.get_local_rank(0)]
            local = torch.arange(extent, dtype=torch.float64)[start:stop].view(1, 1, -1, 1).expand(2, 3, -1, 2)
            moved.clear()
            fetched = which.fetch(local.contiguous(), fill=FILLED)
            calls = len(moved)
            assert bool((fetched == fetched[:1, :1, :, :1]).all())
            generator = torch.Generator().manual_seed(dist.get_rank())
            x = torch.randn(2, 3, stop - start, 2, generator=generator, dtype=torch.float64)
            wide = which.fetch(x)
            y = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
            adjoint = which.adjoint(y)
            pieces = dict(which.fetch_in_turn(x))
            assert sum(b - a for a, b in pieces) == wide.shape[2]
            assert torch.equal(torch.cat([pieces[interval] for interval in sorted(pieces)], 2), wide)
            order.clear()

            def make(interval: tuple[int, int], y: torch.Tensor = y) -> torch.Tensor:
                order.append(f"{interval[0]}:{interval[1]}")
                return y[:, :, slice(*interval)]

            assert torch.equal(which.adjoint_in_turn(make, y.shape, y), adjoint)
            sides = torch.stack([(wide * y).sum(), (x * adjoint).sum()])
            dist.all_reduce(sides)
            gap = float(sides[0] - sides[1])
            results[name] = Answer(fetched[0, 0, :, 0].int().tolist(), gap, calls, sum(moved), [*order])
    finally:
        group_calls.all_to_all_single = transport
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fetch_and_adjoint(ranks: Callable[[int], Ranks], size: int) -> None:
    answers = ranks(size).run(fetch_everywhere, list(CASES))
    for name, (extent, need) in CASES.items():
        owned = ownership(extent, size)
        for rank, answer in enumerate(each[name] for each in answers):
            wanted_here = index_map(need(extent, owned[rank]))
            assert answer.fetched == wanted_here, name
            assert abs(answer.gap) < 1e-12, name
            needs = [set(index_map(need(extent, mine))) - {FILLED} for mine in owned]
            received = needs[rank] - set(range(*owned[rank]))
            given = [i for peer, theirs in enumerate(needs) if peer != rank for i in theirs & set(range(*owned[rank]))]
            # Twelve elements per position; fetches receive what is missing, adjoints receive what was given.
            assert answer.moved == 12 * (3 * len(received) + 2 * len(given)), name
            silent = not any(theirs - set(range(*mine)) for theirs, mine in zip(needs, owned, strict=True))
            assert answer.calls == (0 if silent else 1), name
            made = [at for at in answer.order if at != "sent"]
            assert sorted(i for at in made for i in range(*map(int, at.split(":")))) == list(range(len(wanted_here)))
            if not silent:
                sent = answer.order.index("sent")
                before = {wanted_here[i] for at in made[:sent] for i in range(*map(int, at.split(":")))}
                after = {wanted_here[i] for at in made[sent:] for i in range(*map(int, at.split(":")))}
                own = {FILLED, *range(*owned[rank])}
                assert not before & own and after <= own, name


def test_pieces_are_disjoint_and_ascending() -> None:
    intervals = wanted((Piece(4, 9, -1), Piece(2, 0), Piece(1, 3)))
    assert all(a[1] < b[0] for a, b in pairwise(intervals))
