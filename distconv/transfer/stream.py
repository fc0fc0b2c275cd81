"""Runs work on the stream of a GPU on which it was begun, and hands the result to another stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Stream:
    """The stream that is current now on a tensor's device; on a processor there is none, and nothing waits."""

    def __init__(self, x: Tensor) -> None:
        self._stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

    def run(self, make: Callable[[], Tensor]) -> Tensor:
        """The result of ``make`` on this stream, in whose order the allocator then reuses its memory."""
        if self._stream is None or self._stream == torch.cuda.current_stream(self._stream.device):
            return make()
        with torch.cuda.stream(self._stream):
            return make()

    def hand_over(self, made: Tensor) -> Tensor:
        """A tensor that was made on this stream, for the current stream, which waits for it if it is another one."""
        if self._stream is not None and (now := torch.cuda.current_stream(self._stream.device)) != self._stream:
            now.wait_stream(self._stream)
            made.record_stream(now)
        return made
