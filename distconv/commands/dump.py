"""python -m distconv dump: shows where the ranks of a running job are in their program."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path
from typing import Any

from distconv.job.launcher import BadInput

BRIEF = "show where the ranks of a running job are"
DESCRIPTION = """\
Asks a running job where its ranks are: the line of the script, and the collective in which a rank waits. The answer is
printed by the job itself, on its stderr, within three seconds. The job goes on.
"""
EPILOG = """\
examples:
  python -m distconv dump 4711      4711: the process of distconv run, or of the torchrun or mpiexec that started it

In the terminal of a job of distconv run, Ctrl-\\ asks the same.
"""


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    parser.add_argument("process", type=int, metavar="PID", help="the number of the job's process")


def command(options: argparse.Namespace) -> int:
    """Asks every process of the job that can be asked."""
    asked = [process for process in family(options.process) if _is_ours(process)]
    if not asked:
        raise BadInput(f"process {options.process} is no running job of distconv run, nor has it started one")
    try:
        for process in asked:
            os.kill(process, signal.SIGQUIT)
    except PermissionError:
        raise BadInput(f"process {options.process} belongs to somebody else") from None
    print("The job prints where its ranks are on its own stderr.")
    return 0


def family(process: int) -> list[int]:
    """A process that runs, and all that it has started, directly or not."""
    if not Path(f"/proc/{process}").exists():
        return []
    children = (path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children"))
    return [process, *(other for some in children for child in some for other in family(int(child)))]


def _is_ours(process: int) -> bool:
    """Whether it is of distconv run and would not be ended by the question."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.M)
    except OSError:  # it has ended
        return False
    module = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words else []
    is_distconv = module == ["distconv"] or any(os.path.basename(word) == "distconv" for word in words[:2])
    return is_distconv and caught is not None and bool(int(caught[1], 16) >> (signal.SIGQUIT - 1) & 1)
