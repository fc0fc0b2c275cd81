"""A step that waits for ever for a process that it has started in another session, to try that a run goes on."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.fifteen import Run


def measure(run: Run) -> bool:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) as process:
        run.figures.add("before the hang", process.pid)
    return True
