"""Blocks of vision transformers against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks
from reference import errors
from vision_blocks import BLOCKS

pytestmark = pytest.mark.gloo


def compare(partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """{block: its errors} of those that differ from one process."""
    wrong: dict[str, Any] = {}
    for name, build in BLOCKS.items():
        try:
            found = errors(lambda build=build: build(*shape[1:]), [shape], partition)  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"in block {name!r} on {partition}")
            raise
        if not max(found.values()) < 1e-10:
            wrong[name] = found
    return wrong


PARTITIONS = [
    (4, "height=2,width=2", (2, 8, 8, 8)),
    (4, "height=4", (1, 8, 8, 6)),
    (4, "channel=4", (2, 8, 8, 4)),
    (4, "sample=2,channel=2", (3, 8, 4, 8)),
]


@pytest.mark.parametrize("size, partition, shape", PARTITIONS, ids=[partition for _, partition, _ in PARTITIONS])
def test_blocks_equal_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, shape: tuple[int, ...]
) -> None:
    for rank, wrong in enumerate(ranks(size).run(compare, partition, shape)):
        assert not wrong, f"rank {rank}"
