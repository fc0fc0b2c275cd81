"""Pictures of exchanges, row by row."""

from __future__ import annotations

from distconv.settings.partition import ownership
from distconv.transfer.exchange import Exchange
from distconv.transfer.needs import LEGEND, WIDEST, Piece, make_exchange_plan, picture, window


def test_a_halo() -> None:
    owned = ownership(12, 3)
    needs = tuple(window((a - 1, b + 1), 12) for a, b in owned)
    rows = ["r0   ooos^-------  1 from r1, fills 1", "r1   ---^soos^---  1 from r0, 1 from r2"]
    rows += ["r2   -------^sooo  1 from r1, fills 1"]
    assert picture(owned, needs).splitlines() == [f"12 positions, 3 ranks: {LEGEND}", *rows]
    exchange = Exchange(make_exchange_plan(owned, needs, 0), 2, None, owned, needs)
    assert str(exchange) == f"along dim 2: {picture(owned, needs)}"
    assert repr(exchange) == "Exchange(dim=2, Route(sent=(0, 1, 0), received=(0, 1, 0)))"
    assert all(row in " ".join((Exchange.__doc__ or "").split("\n")) for row in rows)


def test_a_rank_without_positions_and_a_reflection() -> None:
    owned, needs = ((0, 2), (2, 3), (3, 3)), ((Piece(2, 2, -1),), (Piece(1, 2),), (Piece(3, 0),))
    assert picture(owned, needs).splitlines()[1:] == [
        "r0   ss^  1 from r1",
        "r1   --s",
        "r2   ^^^  2 from r0, 1 from r1",
    ]


def test_a_long_dim_is_drawn_to_scale() -> None:
    owned = ownership(1000, 2)
    title, first, second = picture(owned, tuple(window((a - 1, b + 1), 1000) for a, b in owned)).splitlines()
    assert title.endswith("; 11 positions a character")
    row = first.split()[1]
    assert len(row) <= WIDEST and row.count("^") == 1 and row == "o" * row.count("o") + "^" + "-" * row.count("-")
    assert second.split()[1].count("^") == 1
