"""Tests say how large tensors may be that operators without a rule of their own gather within a model's call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distconv.rules import whole
from distconv.tensors.gathering.record import model_call


@contextlib.contextmanager
def gathered_up_to(size: int) -> Iterator[None]:
    """As within a model's call, where at most so many bytes are gathered for an operator; 0: as if all were many."""
    usual, whole.MOST_BYTES = whole.MOST_BYTES, size
    try:
        with model_call():
            yield
    finally:
        whole.MOST_BYTES = usual
