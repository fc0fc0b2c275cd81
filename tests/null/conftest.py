"""Tests of the null card itself (tests/null_card); `make test-null` runs them, and elsewhere they are skipped."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def card() -> Any:
    """The module by which the card is asked what it has counted."""
    if "NULL_CARD_CUDNN" not in os.environ:
        pytest.skip("no null card: `make test-null` runs these tests")
    importlib.import_module("torch")  # which loads the modules of the card itself
    return importlib.import_module("null_card")


@pytest.fixture(autouse=True)
def in_order(card: Any) -> Iterator[None]:
    """Whatever a test does waits for what it depends on."""
    with importlib.import_module("null_card_order").in_order():
        yield


@pytest.fixture
def watched(card: Any) -> None:
    """The card watches the order of uses."""
    if not importlib.import_module("null_card_order").is_kept():
        pytest.skip("NULL_CARD_ORDER is not set")
