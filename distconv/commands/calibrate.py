"""python -m distconv calibrate: measures this machine for distconv plan and run --partition auto."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from distconv.job.launcher import BadInput
from distconv.performance.machine import here
from distconv.place import find_place
from mucudnn.commands.arguments import check_writable

BRIEF = "measure this machine for plan and run --partition auto"
DESCRIPTION = """\
Measures what a performance model needs to know of this machine, with as many ranks as a job has, all at the same time:
arithmetic, memory, the latency and the bandwidth of messages, and what distconv's host code takes for each operator.
Takes some seconds. The result is a machine file, for --machine; without -o it is kept as that of the name "here".
"""
EPILOG = """\
examples:
  python -m distconv calibrate --nproc 4
  mpiexec -n 4 python -m distconv calibrate -o cluster.toml
  python -m distconv plan nets.py:Net --input 8,3,224,224 --ranks 4 --machine here
"""

MEASURES = "distconv.performance.calibration"  # The module that the ranks run.


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start on this machine (default: its cores)")
    parser.add_argument("-o", "--output", metavar="FILE", help="the machine file to write (default: that of 'here')")


def command(options: Any) -> int:
    """Becomes the job that measures: on ranks of its own, or on those that a launcher started."""
    place = find_place(os.environ)
    ranks = options.nproc
    if ranks is None:
        ranks = os.cpu_count() or 1 if place is None else place.size
    if ranks is None:
        raise BadInput("the launcher does not say how many ranks there are: give --nproc N")
    if ranks < 1:
        raise BadInput(f"--nproc {ranks}: accepted: 1 or more")
    output = Path(options.output or here()).absolute()
    if options.output is None:
        output.parent.mkdir(parents=True, exist_ok=True)
    check_writable("--output", str(output))
    run = ["-m", "distconv", "run", "--show-ranks", "--partition", f"sample={ranks}", "-m", MEASURES, str(output)]
    os.execv(sys.executable, [sys.executable, *run])
