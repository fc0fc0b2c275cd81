"""The stream of a GPU on which something was begun, and others that use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Stream:
    """The stream that is current now on a tensor's device; on a processor there is none, and nothing waits."""

    def __init__(self, x: Tensor) -> None:
        self._stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

    def run(self, make: Callable[[], Tensor]) -> Tensor:
        """What a function makes on this stream, where it was begun: its memory is given away in the order of one."""
        if self._stream is None or self._stream == torch.cuda.current_stream(self._stream.device):
            return make()
        with torch.cuda.stream(self._stream):
            return make()

    def hand_over(self, made: Tensor) -> Tensor:
        """What was made on this stream, for the current one, which waits for it where it is another."""
        if self._stream is not None and (now := torch.cuda.current_stream(self._stream.device)) != self._stream:
            now.wait_stream(self._stream)
            made.record_stream(now)
        return made
