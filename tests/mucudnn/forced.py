"""Plans that are forced: a board on which all times have been posted already, so that no timing decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mucudnn
from mucudnn.convolution.problem import Dim
from mucudnn.timing.board import Board

STOCK_SECONDS, PART_SECONDS = 1.0, 0.1


class Forced(Board):
    """Times by which every convolution that an algorithm serves is cut in two halves and computed by it."""

    def __init__(self, algorithm: str, spatial: bool = False) -> None:
        """
        Args:
            spatial: whether the halves are tiles wherever the convolution can be cut along space.
        """
        self._algorithm, self._spatial = algorithm, spatial

    def claim(self, name: str) -> bool:
        return False

    def post(self, name: str, text: str) -> None:
        raise AssertionError("everything is known already")

    def read(self, name: str) -> str | None:
        raise AssertionError("everything is known already")

    def look(self, name: str) -> str | None:
        raise AssertionError("everything is known already")

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """Seconds of torch's own kernel, or of a division as a whole."""
        if key["work"] == "stock":
            return STOCK_SECONDS
        if key["work"].startswith("check "):
            return measure()
        is_spatial = key["work"].count(" ") == 2  # "division height 4:fft+4:fft"
        return PART_SECONDS if is_spatial else 2 * PART_SECONDS

    def given(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The launches of an algorithm along a dim: its halves."""
        dim, algorithm = key["work"].split(" ")
        is_batch = dim == Dim.BATCH
        if algorithm != self._algorithm or not (self._spatial or is_batch):
            return []
        whole = key["extent"] if is_batch else key["x" if _makes_x(key) else "y"][1]
        larger = -(-whole // 2)
        seconds = 3 * PART_SECONDS if self._spatial and is_batch else PART_SECONDS
        return [[extent, algorithm, seconds, 0] for extent in {larger, whole - larger} if extent]


def _makes_x(key: Mapping[str, Any]) -> bool:
    return key["direction"] == ("forward" if key["transposed"] else "backward_data")


@contextmanager
def forced(algorithm: str, spatial: bool = False, **settings: Any) -> Iterator[None]:
    """`mucudnn.patched` with forced plans; at the end at least one of them must have run to its end.

    A plan whose algorithm fails gives way to torch's own kernel and is no longer counted.
    """
    with mucudnn.patched(board=Forced(algorithm, spatial), **{"database": ":memory:"} | settings):
        yield
        assert divided() >= 1, f"nothing was computed by {algorithm}"


def divided() -> int:
    """Convolutions met that torch's own kernel does not serve alone."""
    return sum(len(record.parts) > 1 or record.parts[0][1] != "stock" for record in mucudnn.report())
