"""What a test says of a rank that a fatal signal has ended."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from ranks import RankDied, Ranks


def ends_by_a_fatal_signal() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_crash_names_its_signal_and_where_python_was() -> None:
    pool = Ranks(2, "gloo")
    with pytest.raises(RankDied, match=rf"code {-signal.SIGSEGV:d}(?s:.)*in ends_by_a_fatal_signal"):
        pool.run(ends_by_a_fatal_signal)
    pool.close()
