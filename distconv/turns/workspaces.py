"""Frees cuBLAS workspaces: torch keeps one, 32 MiB on an H100, for every thread and stream that multiplies matrices.

Parts are threads of which one runs at a time, so that one workspace is enough for all of them.
"""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing.connection
import queue
import selectors
import sys
import threading

import torch

from distconv.turns import baton

_WAITS = {
    each.__file__
    for each in (concurrent.futures.thread, multiprocessing.connection, queue, selectors, threading, baton)
}
"""The files in which threads wait for each other, and compute nothing."""


def may_be_released(device_type: str) -> bool:
    """Whether workspaces may be released now: a CUDA graph that the program has captured may go on using its own.

    Such a graph has a memory pool of its own.
    """
    if device_type != "cuda" or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return False
    return all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot())


def release() -> None:
    """Gives all workspaces back to torch's allocator; the next product takes one, in the order of its stream.

    Not while another thread computes something: it may be about to use its own.
    """
    own = threading.get_ident()
    if all(frame.f_code.co_filename in _WAITS for at, frame in sys._current_frames().items() if at != own):
        torch._C._cuda_clearCublasWorkspaces()
