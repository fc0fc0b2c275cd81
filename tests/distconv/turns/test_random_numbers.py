"""Each part draws from the generators of the process what it would alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distconv.turns.random_numbers import RandomNumbers, _numpy_source, _python_source, _Source

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(2).tolist(),
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),  # every second one was kept
    "python, seed": lambda: random.seed(7),
    "python, state": lambda: random.setstate(random.Random(5).getstate()),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, normal": lambda: np.random.randn(),
    "numpy, seed": lambda: np.random.seed(7),
    "numpy, all words": lambda: np.random.bytes(4 * 624)[:8],  # after which the position is the same
    "nothing": lambda: None,
}


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("first", DRAWS)
def test_parts_draw_the_numbers_of_one_process(first: str) -> None:
    """In turn, with the draws in another order in every part."""
    names = [first, *DRAWS, *reversed(DRAWS), first]
    orders = [names, names[::-1], names[3:] + names[:3]]
    alone = []
    for order in orders:
        seed()
        alone.append([DRAWS[name]() for name in order])
    seed()
    numbers = RandomNumbers(len(orders), "cpu")
    found: list[list[Any]] = [[] for _ in orders]
    for at in range(len(names)):
        for part, order in enumerate(orders):
            numbers.arrive(part)
            found[part].append(DRAWS[order[at]]())
            numbers.leave(part)
    assert found == alone
    numbers.hand_over()
    after = [draw() for draw in DRAWS.values()]
    seed()
    for name in orders[0]:
        DRAWS[name]()
    assert after == [draw() for draw in DRAWS.values()]


def test_states_are_read_only_where_numbers_were_drawn() -> None:
    for source, draw in ((_python_source(), random.random), (_numpy_source(np.random), np.random.rand)):
        assert not isinstance(source, _Source)
        state = source.read()
        assert source.read() is state
        draw()
        assert source.read() is not state
