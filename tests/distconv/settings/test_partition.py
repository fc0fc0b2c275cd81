from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from distconv.settings.partition import Partition, nested_ownership, numbers, ownership, together
from distconv.tensors.mesh import _placements


@pytest.mark.parametrize(
    "text, axes",
    [
        ("sample=2,height=2", (("sample", 2), ("height", 2))),
        (" width = 4 ", (("width", 4),)),
        ("height=1,depth=3,sample=1", (("height", 1), ("depth", 3), ("sample", 1))),
    ],
)
def test_parse(text: str, axes: tuple[tuple[str, int], ...]) -> None:
    assert Partition.parse(text).axes == axes


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "'' is not axis=ranks"),
        ("height", "'height' is not axis=ranks"),
        ("rows=2", "unknown axis 'rows'"),
        ("height=2,height=2", "axis 'height' appears twice"),
        ("height=0", "'0' is not a number of ranks"),
        ("height=two", "'two' is not a number of ranks"),
        ("height=-1", "'-1' is not a number of ranks"),
    ],
)
def test_parse_refuses_in_one_line(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as raised:
        Partition.parse(text)
    message = str(raised.value)
    assert message.startswith(f"partition {text!r}: {fault}") and "accepted: " in message and "\n" not in message


@pytest.mark.parametrize(
    "names, sizes, ndim, expected",
    [
        (("sample", "height"), (2, 2), 4, (Shard(0), Shard(2))),
        (("depth", "width"), (2, 2), 5, (Shard(2), Shard(4))),
        (("width",), (4,), 3, (Shard(2),)),
        (("sample", "height"), (2, 2), 2, (Shard(0), Replicate())),
        (("sample", "height"), (2, 2), 1, (Shard(0), Replicate())),
        (("sample",), (2,), 0, (Replicate(),)),
        (("depth", "height"), (1, 2), 4, (Replicate(), Shard(2))),
        (("channel", "filter", "width"), (2, 2, 2), 4, (Shard(1), Shard(1), Shard(3))),
        (("sample", "channel"), (2, 2), 2, (Shard(0), Shard(1))),
        (("channel",), (2,), 1, (Replicate(),)),
    ],
)
def test_placements(names: tuple[str, ...], sizes: tuple[int, ...], ndim: int, expected: tuple[object, ...]) -> None:
    assert _placements(names, sizes, ndim) == expected


@pytest.mark.parametrize("axis, ndim", [("depth", 4), ("height", 3), ("depth", 3)])
def test_a_network_without_the_dim(axis: str, ndim: int) -> None:
    with pytest.raises(
        ValueError, match=rf"partition axis {axis}=2: {ndim - 2}-D data .* has no {axis}; accepted: sample"
    ):
        _placements((axis,), (2,), ndim)


@given(st.integers(0, 50), st.integers(1, 9))
def test_ownership_is_that_of_chunk(extent: int, ranks: int) -> None:
    chunks = [(int(c[0]), int(c[-1]) + 1) for c in torch.arange(extent).chunk(ranks) if len(c)]
    owned = ownership(extent, ranks)
    assert [interval for interval in owned if interval[0] < interval[1]] == chunks
    assert all(interval == (extent, extent) for interval in owned[len(chunks) :])


@given(st.integers(0, 50), st.lists(st.integers(1, 4), max_size=3))
def test_nested_ownership_is_that_of_chunks_of_chunks(extent: int, sizes: list[int]) -> None:
    pieces = [torch.arange(extent)]
    for size in sizes:
        pieces = [part for piece in pieces for part in _padded(piece, size)]
    assert [list(range(*interval)) for interval in nested_ownership(extent, tuple(sizes))] == [
        p.tolist() for p in pieces
    ]


def _padded(piece: torch.Tensor, size: int) -> list[torch.Tensor]:
    chunks = list(piece.chunk(size)) if len(piece) else []
    return chunks + [piece[:0]] * (size - len(chunks))


@pytest.mark.parametrize(
    ("ranks", "parts", "both", "order"),
    [
        ("height=2", "height=3", "height=6", [0, 1, 2, 3, 4, 5]),
        ("sample=2", "height=3", "sample=2,height=3", [0, 1, 2, 3, 4, 5]),
        ("height=2", "sample=2", "height=2,sample=2", [0, 1, 2, 3]),
        ("height=2", "width=2,height=2", "height=4,width=2", [0, 2, 1, 3, 4, 6, 5, 7]),
        ("sample=2,height=2", "height=2", "sample=2,height=4", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_parts_of_ranks_lie_side_by_side(ranks: str, parts: str, both: str, order: list[int]) -> None:
    outer, inner = Partition.parse(ranks), Partition.parse(parts)
    assert str(together(outer, inner)) == both
    assert numbers(outer, inner) == order
