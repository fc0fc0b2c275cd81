"""Tests say how large tensors may be that operators without a rule of their own gather."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distconv.rules import whole as small


@contextlib.contextmanager
def gathered_up_to(size: int) -> Iterator[None]:
    """Within it, sharded tensors of at most so many bytes are gathered; 0: as if all tensors were large."""
    usual, small.MOST_BYTES = small.MOST_BYTES, size
    try:
        yield
    finally:
        small.MOST_BYTES = usual
