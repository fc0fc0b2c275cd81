"""Random states that go between processes as text."""

from __future__ import annotations

import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from distconv.job.random_state import as_text, from_text, set_generators, state_of_generators


def draws() -> list[float]:
    """Of every generator, an odd number of those that are made in pairs."""
    return [random.gauss(0, 1), random.random(), *numpy.random.normal(size=3), *torch.randn(3).tolist()]


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_generators_go_on_as_where_their_state_was_read(seed: int, before: int) -> None:
    kept = state_of_generators()
    random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
    for _ in range(before):
        draws()
    text = as_text(state_of_generators())
    expected = [draws() for _ in range(3)]
    random.seed(), numpy.random.seed(), torch.seed()
    set_generators(from_text(text))
    assert [draws() for _ in range(3)] == expected
    set_generators(kept)
