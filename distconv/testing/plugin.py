"""The pytest plugin."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_same_on_ranks() -> Callable[..., None]:
    """`distconv.testing.assert_same_on_ranks`: a model on several ranks computes what it computes on one."""
    from distconv.testing.comparison import assert_same_on_ranks

    return assert_same_on_ranks
