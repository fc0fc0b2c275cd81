"""Ranks that compare samples one at a time; replaced if they hang."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.operators.rank import Outcome, Rank
from benchmarks.operators.samples import Module, Operator
from benchmarks.rank_pool import Failure, Hang, RankPool

ANSWER_SECONDS = 30.0
"""A sample for which no rank answers within so long hangs."""


class Pool:
    """``size`` ranks over Gloo, one thread each."""

    def __init__(self, size: int, entries: Sequence[Operator | Module], most: int, small_bytes: int) -> None:
        self._ranks = RankPool(size, lambda: Rank(entries, most, small_bytes))

    def open(self, entry: int) -> int:
        """How many samples an entry has; none where they cannot be made."""
        count = self._ranks.ask("open", entry, within=ANSWER_SECONDS)[0]
        return 0 if isinstance(count, Failure) else count

    def compare(self, entry: int, sample: int, partition: str) -> Outcome:
        """The ranks' outcome of a sample: that of all of them, or a crash where they differ."""

        def failed(answer: Outcome | Failure) -> bool:
            return isinstance(answer, Failure) or answer[0] in ("refused", "crash")

        try:
            answers = self._ranks.ask("compare", entry, sample, partition, within=ANSWER_SECONDS, failed=failed)
        except Hang as hang:
            return "hang", "", str(hang)
        outcomes: list[Outcome] = [("crash", "", a.text) if isinstance(a, Failure) else a for a in answers]
        kinds = {outcome[0] for outcome in outcomes}
        if len(kinds) == 1 or kinds <= {"right", "gathered", "wrong"}:
            return max(outcomes, key=lambda outcome: outcome[0] == "wrong")
        return "crash", "", f"the ranks differ: {outcomes}"[:400]

    def close(self) -> None:
        """Ends the ranks; the next request starts new ones."""
        self._ranks.close()
