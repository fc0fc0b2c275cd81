"""The picture of an exchange: one row a rank, one character a position of the dim."""

from __future__ import annotations

from collections.abc import Sequence

from distconv.transfer.needs import Need, wanted
from mucudnn.convolution.geometry import Interval, intersect, length

WIDEST = 96  # Characters of a row; a longer dim has several positions to a character.

LEGEND = "o owned, s owned and sent, ^ received, - neither"


def picture(owned: Sequence[Interval], needs: Sequence[Need]) -> str:
    """Draws what each rank owns, sends, receives and fills along the dim: rank r owns ``owned[r]``, needs ``needs[r]``.

    A character that covers several positions shows the most important of them: received before sent before owned.
    """
    extent = max((stop for _, stop in owned), default=0)
    scale = -(-extent // WIDEST) or 1
    title = f"{extent} positions, {len(owned)} ranks: {LEGEND}"
    rows = [title if scale == 1 else f"{title}; {scale} positions a character"]
    for rank, need in enumerate(needs):
        received = {
            peer: [common for source in wanted(need) if length(common := intersect(theirs, source))]
            for peer, theirs in enumerate(owned)
            if peer != rank
        }
        sent = [
            common
            for peer, other in enumerate(needs)
            for source in wanted(other)
            if peer != rank and length(common := intersect(owned[rank], source))
        ]
        row = ["-"] * -(-extent // scale)
        arrived = [interval for intervals in received.values() for interval in intervals]
        for mark, intervals in (("o", [owned[rank]]), ("s", sent), ("^", arrived)):
            for start, stop in intervals:
                for at in range(start // scale, -(-stop // scale) if stop > start else 0):
                    row[at] = mark
        counts = [f"{sum(map(length, parts))} from r{peer}" for peer, parts in received.items() if parts]
        filled = sum(piece.length for piece in need if piece.start is None)
        counts += [f"fills {filled}"] if filled else []
        rows.append(f"r{rank:<3} {''.join(row)}  {', '.join(counts)}".rstrip())
    return "\n".join(rows)
