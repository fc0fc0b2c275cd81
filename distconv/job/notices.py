"""Notices about how ranks end, which the ranks and the processes that watch them leave in the job's key-value store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from distconv.job.attempt import prefix, without_prefix

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ANSWER_SECONDS = 3.0  # what ranks get to report where they are

_T = TypeVar("_T")


class Notices:
    """The notices of a job. Nothing here is collective, and nothing waits for a rank.

    Exit codes are those of subprocess.Popen: -n where signal n killed the rank. If the store has gone, as its process
    was killed, every question has a default answer.
    """

    def __init__(self, store: Store, size: int) -> None:
        from torch.distributed import DistError

        self._gone = DistError
        self._store, self._at, self.size = without_prefix(store), prefix("ending"), size

    def whereabouts(self) -> list[str]:
        """The positions of the ranks, a line for each."""
        from distconv.job.whereabouts import Questions

        return self._asked(lambda: Questions(self._store, self.size).asked_now(ANSWER_SECONDS), [])

    def claim(self) -> bool:
        """Whether the caller is the first to ask, and so the one that reports why the job ends."""
        return self._asked(lambda: bool(self._store.add(f"{self._at}/reported", 1) == 1), False)

    def fail(self, rank: int, error: str) -> None:
        """Notes the error that a rank's script ended with."""
        self._note(f"{rank}/error", error)

    def error(self, rank: int) -> str | None:
        """The error that a rank's script ended with, if it is known."""
        key = f"{self._at}/{rank}/error"
        return self._asked(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def reported(self) -> bool:
        """Whether somebody has reported why the job ends, or need not: the user asked for it by a signal."""
        return self._is_noted("reported") or self.is_signalled()

    def signalled(self) -> None:
        """Notes that a signal from outside ends the job: that ranks lose one another is no news then."""
        self._note("signalled")

    def is_signalled(self) -> bool:
        """Whether a signal from outside ends the job."""
        return self._is_noted("signalled")

    def record(self, rank: int, code: int) -> None:
        """Notes how a rank ended."""
        self._note(str(rank), str(code))
        self._note("any")

    def sweep(self) -> None:
        """Notes that the job's folder has been removed."""
        self._note("swept")

    def swept(self) -> bool:
        """Whether the job's folder has been removed."""
        return self._is_noted("swept", otherwise=True)

    def leave(self, rank: int) -> None:
        """Notes that the process that watches a rank needs the notices no more."""
        self._note(f"left/{rank}")

    def all_left(self) -> bool:
        """Whether no watching process needs the notices any more."""
        return self._is_noted(*(f"left/{rank}" for rank in range(self.size)), otherwise=True)

    def endings(self) -> Mapping[int, int]:
        """The exit codes of the ranks that have ended so far."""

        def read() -> dict[int, int]:
            ended = [rank for rank in range(self.size) if self._store.check([f"{self._at}/{rank}"])]
            return {rank: int(self._store.get(f"{self._at}/{rank}")) for rank in ended}

        return self._asked(read, {}) if self._is_noted("any") else {}

    def _note(self, what: str, text: str = "1") -> None:
        self._asked(lambda: self._store.set(f"{self._at}/{what}", text), None)

    def _is_noted(self, *what: str, otherwise: bool = False) -> bool:
        """Whether all of it is noted; `otherwise` where the store has gone."""
        return self._asked(lambda: bool(self._store.check([f"{self._at}/{each}" for each in what])), otherwise)

    def _asked(self, question: Callable[[], Any], otherwise: _T) -> _T:
        try:
            answer: _T = question()
        except self._gone:
            return otherwise
        return answer


def shell_code(code: int) -> int:
    """A shell's exit code for the `code` of subprocess.Popen: 128 + n if signal n killed the process."""
    return code if code >= 0 else 128 - code


def how_it_ended(rank: int, size: int | None, code: int) -> str:
    """One line about a rank whose end ends the job."""
    who = f"rank {rank}" if size is None else f"rank {rank} of {size}"
    if code < 0:
        return f"{who} was killed (signal {-code})"
    if code:
        return f"{who} ended with exit code {code} while others were still running"
    return f"{who} ended early (exit code 0) while others waited for it"
