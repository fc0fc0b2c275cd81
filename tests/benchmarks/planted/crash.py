"""A step that ends its process, to try that a run goes on behind it."""

from __future__ import annotations

import os
import signal

from benchmarks.gpu.fifteen import Run


def measure(run: Run) -> bool:
    run.figures.add("before the crash", "kept")
    os.kill(os.getpid(), signal.SIGSEGV)
    return True
