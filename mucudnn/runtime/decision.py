"""Decision: how the convolutions of one shape and direction are computed."""

from __future__ import annotations

from typing import Protocol

import torch

from mucudnn.convolution.call import Call
from mucudnn.reporting.record import Record


class Decision(Protocol):
    """What is decided for the convolutions of one shape and direction; there is one kind for each kind of limit."""

    def run(self, call: Call) -> torch.Tensor | None:
        """The call's result, in the strides of torch's own; `None` where torch's own kernel is to compute it."""
        ...

    def records(self) -> list[Record]:
        """What is decided, for people: a record for every plan in use."""
        ...
