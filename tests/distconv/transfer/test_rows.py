"""What exchanges fetch, row by row: each element of 7 rows over 3 ranks is the number of its row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ranks import Ranks

import distconv
from distconv.tensors.layouts import owners
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import Need, Piece, window

ROWS = 7  # Rank 0 owns rows 0 to 2, rank 1 rows 3 to 5, rank 2 row 6.


def made(needs: tuple[Need, ...]) -> tuple[Exchange, torch.Tensor]:
    """The exchange, and the rows that this rank owns."""
    mesh = distconv.init("height=3", device_type="cpu")
    owned = owners(mesh, (0,), ROWS)
    start, stop = owned[mesh.get_local_rank(0)]
    return exchange(mesh, 0, 0, owned, needs), torch.arange(start, stop).float()


def fetched(*needs: Need) -> list[int]:
    """What this rank gets; -1 stands for fill."""
    found, own = made(needs)
    return [int(row) for row in found.fetch(own, fill=-1)]


def readers(*needs: Need) -> list[int]:
    """How many positions of all ranks' needs read each row that this rank owns: the adjoint of ones."""
    found, own = made(needs)
    return [int(row) for row in found.adjoint(torch.ones_like(found.fetch(own)))]


def around(reach: int) -> tuple[Need, ...]:
    """The rows that each rank owns, and so many on both sides."""
    return tuple(window((start - reach, stop + reach), ROWS) for start, stop in ((0, 3), (3, 6), (6, 7)))


def test_a_halo_is_a_row_of_each_neighbour_and_fill_at_the_edges(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(fetched, *around(1)) == [[-1, 0, 1, 2, 3], [2, 3, 4, 5, 6], [5, 6, -1]]


def test_the_adjoint_counts_who_reads_a_row(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(readers, *around(1)) == [[1, 1, 2], [2, 1, 2], [2]]


def test_a_halo_wider_than_a_neighbours_shard_is_of_two_ranks(ranks: Callable[[int], Ranks]) -> None:
    first, _, last = ranks(3).run(fetched, *around(4))
    assert first == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6]
    assert last == [2, 3, 4, 5, 6, -1, -1, -1, -1]


def test_a_circular_halo_is_of_the_other_end_and_a_reflection_is_backwards(ranks: Callable[[int], Ranks]) -> None:
    circular, reflected = (Piece(1, 6), Piece(3, 0), Piece(1, 3)), (Piece(2, 5, -1), Piece(1, 6))
    assert ranks(3).run(fetched, circular, (), reflected) == [[6, 0, 1, 2, 3], [], [5, 4, 6]]


def test_who_needs_nothing_still_sends(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(fetched, (Piece(7, 0),), (), ()) == [[0, 1, 2, 3, 4, 5, 6], [], []]
    assert ranks(3).run(readers, (Piece(7, 0),), (), ()) == [[1, 1, 1], [1, 1, 1], [1]]
