"""Plans that are forced: a board on which all times have been posted already, so that no timing decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import mucudnn
from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import divided_dims, extent, kinds
from mucudnn.providers import STOCK, providers_on
from mucudnn.timing.board import Board

STOCK_SECONDS, PART_SECONDS = 1.0, 0.1


class Forced(Board):
    """Plans by which every convolution that an algorithm serves is cut in two halves and computed by it."""

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

    def read(self, name: str) -> str:
        raise AssertionError("everything is known already")

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """A plan as plain values."""
        problem = ConvProblem.from_launch_key(key, key["extent"])
        stock: dict[str, Any] = dict.fromkeys(("seconds", "undivided_seconds", "stock_seconds"), STOCK_SECONDS)
        stock |= {"dim": Dim.BATCH, "parts": [[problem.extent, STOCK, STOCK_SECONDS, 0]], "options": {}}
        for dim in reversed(divided_dims(problem)) if self._spatial else divided_dims(problem)[:1]:
            whole = extent(problem, dim)
            sizes = [size for size in (-(-whole // 2), whole // 2) if size]
            if all(self._serves(part) for size in set(sizes) for part in kinds(problem, dim, size)):
                parts = [[size, self._algorithm, PART_SECONDS, 0] for size in sizes]
                return {**stock, "dim": dim, "parts": parts, "options": {dim: parts}, "seconds": 2 * PART_SECONDS}
        return stock

    def _serves(self, part: ConvProblem) -> bool:
        return any(
            self._algorithm in provider.algorithms(part) and provider.serves(part, self._algorithm)
            for provider in providers_on(torch.device("cpu"), "heuristic")
        )


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
