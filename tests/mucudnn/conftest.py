"""Fixtures of the mucudnn tests: nothing stays patched, and no database of the user's is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tensor_memory import no_garbage

import mucudnn


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test leaves torch unpatched."""
    yield
    mucudnn.unpatch()


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default database of every test."""
    path = tmp_path / "times.sqlite"
    monkeypatch.setenv("MUCUDNN_DATABASE", str(path))
    return path


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are measured before their first call, where a test does not say otherwise."""
    monkeypatch.setenv("MUCUDNN_PLANNING", "ahead")


@pytest.fixture
def collected_once() -> Iterator[None]:
    """Garbage is collected before a test that measures memory, and not once more before each of its examples."""
    with no_garbage():
        yield
