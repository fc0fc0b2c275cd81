"""The bytes that this rank has sent, and the seconds that it has waited for others, while a script runs.

These are of the communication that distconv starts from Python (`distconv.transfer.group_calls` counts it), not of
torch.compile's graphs, nor of the parts that a rank computes in turn.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch

from distconv import settings
from distconv.tensors.read_parts import thread
from mucudnn.devices.process_memory import resident_bytes


@dataclass
class Mark:
    """The bytes sent and the time waited up to a moment."""

    sent: int  # Bytes.
    waited: float  # Seconds.
    at: float  # A time of time.monotonic().


@dataclass
class Account:
    """The communication of a rank so far.

    Attributes:
        sent: bytes to other ranks; an allreduce counts as rings do.
        waited: seconds in which the program waited for messages; on a GPU the device waits, which is not counted.
        calls: outermost calls of models.
        before: bytes that the process had when a model was first called.
        shows: whether each message is printed, by the setting at the last call of a model.
        first_call, first_step: the marks at the end of the first call of a model, and of the first optimizer step.
    """

    sent: int = 0
    waited: float = 0.0
    calls: int = 0
    before: int = 0
    shows: bool = False
    first_call: Mark | None = None
    first_step: Mark | None = None

    def mark(self) -> Mark:
        """This moment."""
        return Mark(self.sent, self.waited, time.monotonic())

    def called(self) -> None:
        """An outermost call of a model begins."""
        if thread.part is not None:
            return
        self.calls += 1
        self.shows = settings.value("debug") == "messages"
        if self.calls == 1:
            self.before = used_bytes()
        elif self.first_call is None:
            self.first_call = self.mark()

    def stepped(self) -> None:
        """An optimizer has stepped."""
        if self.first_step is None:
            self.first_step = self.mark()


ACCOUNT = Account()  # The account of this process.


def used_bytes() -> int:
    """Bytes that this process has: on its GPU, or in the host's memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return resident_bytes()


def most_used_bytes() -> int:
    """The most bytes that this process has had at once."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
