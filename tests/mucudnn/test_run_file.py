"""What a run leaves behind, there and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from test_report import DIVIDED, STOCK

from mucudnn.reporting.record import Moment, Outcome


def test_json_keeps_everything() -> None:
    timeline = (Moment("a", 100, 20, 30.0), Moment("b", 120, 0, math.inf))
    for outcome in (Outcome([DIVIDED, STOCK], [*timeline]), Outcome([], [], ("a sentence",))):
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json(), allow_nan=False))) == outcome


@pytest.mark.parametrize(
    "values", [None, [], {}, {"plans": []}, {"plans": [], "timeline": [{}]}, {"plans": 3, "timeline": []}]
)
def test_json_of_something_else(values: Any) -> None:
    with pytest.raises(ValueError, match="no report of a run"):
        Outcome.from_json(values)
