"""What parts in turn keep on a card: torch's workspace for cuBLAS once, not once for each part's thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TURNS = Path(__file__).with_name("turns.py")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("option, kept", [("--no-graph", 0), ("--graph", 5)])
def test_workspaces_are_released_unless_a_graph_may_use_one(option: str, kept: int) -> None:
    nothing = {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0"}
    done = subprocess.run(
        [sys.executable, str(TURNS), option],
        env={**os.environ, **nothing},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["workspaces"] == kept
