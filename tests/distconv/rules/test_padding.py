from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from reference import Case, wrong
from torch import Tensor, nn

from distconv.rules.views.padding import index_map, restricted

pytestmark = pytest.mark.gloo

Padding = tuple[str, tuple[int, ...], tuple[int, ...]]

CASES: dict[str, Padding] = {
    "constant 3": ("constant", (1, 2, 3, 0), (2, 3, 7, 6)),
    "crop": ("constant", (-1, 2, -3, -1), (2, 3, 9, 6)),
    "crop to nothing in a shard": ("constant", (0, 0, -4, 1), (2, 3, 7, 6)),
    "constant on channels and samples": ("constant", (1, 0, 0, 1, 1, 1, 0, 2), (2, 3, 4, 5)),
    "nothing": ("constant", (0, 0), (2, 3, 7, 6)),
    "zeros": ("zeros", (1, 2, 3, 0), (2, 3, 7, 6)),
    "zeros and a crop": ("zeros", (-1, 2, -3, 1, 1, 1), (2, 3, 9, 6)),
    **{
        f"{mode}, wider than a shard": (mode, (5, 4, 3, 5), (2, 3, 6, 8))
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    **{f"{mode}, one dim": (mode, (2, 3, 0, 0), (1, 2, 5, 4)) for mode in ("reflect", "replicate", "circular")},
    "circular, all around": ("circular", (4, 4, 4, 4), (1, 2, 4, 4)),
}
LINES: dict[str, Padding] = {mode: (mode, (3, 2), (2, 2, 9)) for mode in ("reflect", "replicate", "circular")}
VOLUMES: dict[str, Padding] = {
    mode: (mode, (1, 2, 2, 0, 1, 1), (2, 2, 5, 4, 3)) for mode in ("reflect", "replicate", "circular")
}


class Pad(nn.Module):
    def __init__(self, mode: str, pad: tuple[int, ...]) -> None:
        super().__init__()
        self.mode, self.pad = mode, pad
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mode, value = ("constant", None) if self.mode == "zeros" else (self.mode, 3.0)
        return nn.functional.pad(x, self.pad, mode, value if mode == "constant" else None) * self.gain


@pytest.mark.parametrize(
    "size, partition, cases",
    [
        (1, "height=1", CASES),
        (2, "height=2", CASES),
        (3, "width=3", CASES),
        (4, "height=4", CASES),
        (4, "height=2,width=2", CASES),
        (4, "sample=2,width=2", CASES),
        (4, "width=4", LINES),
        (4, "depth=2,width=2", VOLUMES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_padding_equals_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, cases: dict[str, Padding]
) -> None:
    table: dict[str, Case] = {name: (Pad, (mode, pad), {}, shape) for name, (mode, pad, shape) in cases.items()}
    for rank, found in enumerate(ranks(size).run(wrong, [(partition, table)], 1e-12)):
        assert not found, f"rank {rank}"


@given(
    st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    st.integers(2, 12),
    st.integers(0, 11),
    st.integers(0, 11),
    st.data(),
)
def test_index_maps_are_those_of_torch(mode: str, extent: int, before: int, after: int, data: st.DataObject) -> None:
    before, after = min(before, extent - 1), min(after, extent - 1)
    whole = torch.arange(float(extent)).view(1, 1, -1)
    padded = nn.functional.pad(whole, (before, after), mode, -1 if mode == "constant" else None)
    start = data.draw(st.integers(0, padded.numel()))
    stop = data.draw(st.integers(start, padded.numel()))
    found = [
        -1 if piece.start is None else piece.start + piece.step * i
        for piece in restricted(index_map(mode, extent, before, after), (start, stop))
        for i in range(piece.length)
    ]
    assert found == padded.flatten()[start:stop].int().tolist()
