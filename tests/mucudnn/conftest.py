"""Fixtures of the mucudnn tests: nothing stays patched, and plans can be forced, so that no timing decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import mucudnn
from mucudnn.convolution.problem import ConvProblem, Dim
from mucudnn.convolution.tile import dims, extent
from mucudnn.optimizer import Division, Option
from mucudnn.planning.plan import Plan
from mucudnn.planning.planner import Planner
from mucudnn.providers import STOCK

Force = Callable[..., None]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test leaves torch unpatched."""
    yield
    mucudnn.unpatch()


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Makes every convolution that an algorithm serves be cut in two and computed by it: `force("fft")`.

    With `spatial`, along space where that can be cut.
    """

    def force(algorithm: str, spatial: bool = False) -> None:
        def plan(self: Planner, problem: ConvProblem, environment: object, *measured_with: object) -> Plan:
            dim = dims(problem)[-1] if spatial else Dim.BATCH
            whole = extent(problem, dim)
            parts: tuple[Option, ...] = (Option(whole, STOCK, 1.0, 0),)
            if algorithm in self.providers(problem):
                larger = -(-whole // 2)
                extents = [extent for extent in (larger, whole - larger) if extent]
                parts = tuple(Option(extent, algorithm, 0.1, 0) for extent in extents)
            return Plan(problem, 1e9, dim, Division(parts), {dim: parts}, 0.2, 0.2, 1.0)

        monkeypatch.setattr(Planner, "plan", plan)

    return force
