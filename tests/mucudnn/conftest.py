"""Fixtures of the mucudnn tests: nothing stays patched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mucudnn


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test leaves torch unpatched."""
    yield
    mucudnn.unpatch()
