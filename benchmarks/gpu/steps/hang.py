"""A step that waits for ever beside a process that it has started, to try that a run goes on behind it."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.fifteen import Run


def measure(run: Run) -> bool:
    run.figures.add("before the hang", "kept")
    subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], check=False)
    return True
