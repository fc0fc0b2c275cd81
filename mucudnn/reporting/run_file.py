"""The file that `run --report` writes: the records of all convolutions, and the memory of one step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mucudnn.reporting.record import Record, from_json, to_json


@dataclass(frozen=True)
class Moment:
    """A convolution in the one step whose memory was recorded, in the order of the calls."""

    name: str  # The convolution, for people.
    live: int  # Bytes that are alive when it is called, its result among them.
    workspace: int  # Bytes that its plan uses.
    budget: float  # Bytes that it may use; `math.inf` for no limit.


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the records, and the memory of a step where it was recorded."""

    records: Sequence[Record]  # Of every convolution that was timed.
    timeline: Sequence[Moment] = ()  # Of one step; empty where none was recorded.
    notices: Sequence[str] = ()  # What a user should know about the settings, a sentence each.
    called: int = 0  # Number of convolutions, by shape and direction, that the program called, timed or not.

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`; a limit or budget of `null` means unlimited."""
        timeline = [
            asdict(moment) | {"budget": None if moment.budget == math.inf else moment.budget}
            for moment in self.timeline
        ]
        plans = to_json(self.records)
        return {"plans": plans, "timeline": timeline, "notices": list(self.notices), "called": self.called}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `run --report` promises. Raises OSError if it cannot be written."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def from_json(cls, values: Any) -> Outcome:
        """The outcome that `to_json` made. Raises ValueError if the values are something else."""
        try:
            timeline = [
                Moment(**moment | {"budget": math.inf if moment["budget"] is None else moment["budget"]})
                for moment in values["timeline"]
            ]
            notices = tuple(map(str, values.get("notices", ())))
            return cls(from_json(values["plans"]), timeline, notices, int(values.get("called", 0)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no report of a run: {type(error).__name__}: {error}") from error
