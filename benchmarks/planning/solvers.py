"""How fast decisions are: made-up kernels share out a total, and the dynamic programme at many sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mucudnn.optimizer import Division, Option, desirable_divisions, share
from mucudnn.sizes import format_bytes
from mucudnn.timing import clock


@dataclass(frozen=True)
class Solved:
    """How long a decision takes: the least of three."""

    decision: str
    seconds: float
    gap: float
    target: float


def made_up(kernels: int, divisions: int) -> list[list[Division]]:
    """Desirable sets as networks have them: time falls by up to 80 % as workspace grows to up to 400 MB."""
    source = random.Random(0)
    menus = []
    for _ in range(kernels):
        seconds, size, bend = source.uniform(1e-3, 2e-2), source.uniform(1e6, 4e8), source.uniform(0.3, 3)
        menu = [Division((Option(1, "stock", seconds, 0),))]
        for step in range(1, divisions):
            part = step / (divisions - 1)
            faster = seconds * (1 - 0.8 * part**bend) * source.uniform(0.95, 1.05)
            menu.append(Division((Option(1, "fft", faster, int(size * part * source.uniform(0.8, 1))),)))
        menus.append(menu)
    return menus


def launches(extent: int) -> list[Option]:
    """Eight algorithms at every micro-batch size, times with noise."""
    source = random.Random(0)
    return [
        Option(size, str(number), (0.02 + 0.01 * number + size * (0.05 - 0.004 * number)) * source.uniform(0.95, 1.05),
               int(size * 1e6 * number))
        for number in range(8) for size in range(1, extent + 1)
    ]  # fmt: skip


def solved() -> Iterator[Solved]:
    """The decisions on inputs of the sizes that networks have, their times made up."""

    def least(work: Callable[[], Any]) -> float:
        return min(clock.first_seconds(work) for _ in range(3))

    for extent, target in ((256, 0.1), (1024, 2.0)):
        options = launches(extent)
        seconds = least(lambda options=options, extent=extent: desirable_divisions(options, extent))
        yield Solved(f"desirable set, policy all, B = {extent}, 8 algorithms", seconds, 0.0, target)
    for kernels, divisions, target in ((159, 4, 0.1), (600, 40, 5.0)):
        menus = made_up(kernels, divisions)
        for total in (256 << 20, 4 << 30):
            work = lambda menus=menus, total=total: share(menus, total)  # noqa: E731
            name = f"WD, {kernels} kernels of {divisions}, {format_bytes(total)}"
            yield Solved(name, least(work), work().gap, target)
