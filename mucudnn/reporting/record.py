"""The record of how one convolution is computed and what else was tried, with its JSON form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.sizes import format_bytes


@dataclass(frozen=True)
class Record:
    """How one convolution is computed in one direction, and what else could have been.

    Attributes:
        problem: the convolution.
        direction: "forward", "backward_data" or "backward_filter".
        limit: bytes of workspace that were allowed; `math.inf` for no limit.
        parts: the division, as (extent, algorithm) per launch.
        seconds: of the division, predicted from the times of its launches.
        undivided_seconds: of the best algorithm within the limit that takes the whole mini-batch at once.
        stock_seconds: of torch's own kernel.
        workspace: bytes that the division uses.
        dim: what is divided: "batch", where extents are samples, or "depth", "height" or "length", where they are rows.
        whole_workspace: bytes that the division's algorithms, other than torch's own, would need undivided.
        trials: calls of the program that tried something, where planning is live.
        cost: seconds that these took more than torch's own kernel would have; negative where they were faster.
        tries: algorithms, and how many of these calls tried each.
        calls: of the program, in this run, that the division computed.
        leader: the algorithms of the fastest of what was tried so far, "" where that is torch's own kernel; `None`
            where nothing is tried any more, the division being what was chosen.
        leader_seconds: what that takes.
        wrong: algorithms whose results were wrong, and what was wrong. They are not used, but for torch's own kernel,
            "stock", which computes the whole where nothing else does.
        stock_workspace: bytes of scratch memory of torch's own kernel on the whole; `None` where it is not counted.
        seen: seconds that the calls in this run took; 0 where they were not timed.
        spread: the factor within which the ratio of `seconds` to `stock_seconds` is known, as the two were timed in
            turn; while something is tried, that of `stock_seconds`.
        is_stock_assumed: whether torch's own kernel was never timed, as its scratch memory exceeds the limit:
            `stock_seconds` follow from its operations and bytes.
    """

    problem: ConvProblem
    direction: str
    limit: float
    parts: tuple[tuple[int, str], ...]
    seconds: float
    undivided_seconds: float
    stock_seconds: float
    workspace: int
    dim: str = "batch"
    whole_workspace: int = 0
    trials: int = 0
    cost: float = 0.0
    tries: tuple[tuple[str, int], ...] = ()
    calls: int = 0
    leader: str | None = None
    leader_seconds: float = 0.0
    wrong: tuple[tuple[str, str], ...] = ()
    stock_workspace: int | None = None
    seen: float = 0.0
    spread: float = 1.0
    is_stock_assumed: bool = False

    @property
    def saved(self) -> float:
        """Seconds of this run that torch's own kernel would have taken more; negative where trials cost more.

        What the calls took in this run counts, and the ratio of the times that were taken in turn: the speed of a
        machine changes.
        """
        return self._saved(1.0)

    @property
    def saved_within(self) -> tuple[float, float]:
        """The least and the most that `saved` may be, by the spread of the times."""
        most = math.sqrt(self.spread)
        return self._saved(1 / most), self._saved(most)

    def _saved(self, factor: float) -> float:
        """`saved`, if torch's own kernel took so many times as long."""
        seen, ratio = self.seen or self.calls * self.seconds, self.stock_seconds / max(self.seconds, 1e-12)
        gained = seen * (factor * ratio - 1) if self.calls else 0.0
        return gained - self.cost + (self.trials * (factor - 1) * self.stock_seconds if self.trials else 0.0)

    @property
    def excess(self) -> str:
        """By how much torch's own kernel exceeds the limit where nothing else keeps it, in a sentence."""
        scratch = f"{format_bytes(self.workspace)} of scratch memory in torch's own kernel"
        return f"{self.direction} of {self.problem} takes {scratch}: nothing fits {format_bytes(self.limit)}"

    @property
    def is_divided(self) -> bool:
        """Whether the convolution is divided into several launches."""
        return len(self.parts) > 1

    @property
    def division(self) -> str:
        """The parts in short: "4xfft(16) + gemm(3)", or "depth 4xfft(16)" if not along the batch."""
        runs = ((len(list(group)), extent, algorithm) for (extent, algorithm), group in groupby(self.parts))
        parts = " + ".join(
            f"{f'{count}x' if count > 1 else ''}{algorithm}({extent})" for count, extent, algorithm in runs
        )
        return parts if self.dim == "batch" else f"{self.dim} {parts}"


def to_json(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The records as plain values for `json.dump`; `null` means no limit, or a spread that is not known."""
    unbounded = ("limit", "spread")
    return [
        asdict(record) | {name: None for name in unbounded if getattr(record, name) == math.inf} for record in records
    ]


def from_json(values: Any) -> list[Record]:
    """The records that `to_json` made, after `json.load` or before `json.dump`.

    Raises:
        ValueError: if the values are something else.
    """
    try:
        return [_record(value) for value in values]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"these are no records of mucudnn: {type(error).__name__}: {error}") from error


def _record(value: dict[str, Any]) -> Record:
    problem: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value["problem"].items()
    }
    problem["direction"] = Direction(problem["direction"])
    record = Record(**value | {"problem": ConvProblem(**problem)})
    return replace(
        record,
        limit=math.inf if record.limit is None else record.limit,
        spread=math.inf if record.spread is None else record.spread,
        parts=tuple((int(extent), str(algorithm)) for extent, algorithm in record.parts),
        tries=tuple((str(algorithm), int(count)) for algorithm, count in record.tries),
        wrong=tuple((str(algorithm), str(fault)) for algorithm, fault in record.wrong),
    )
