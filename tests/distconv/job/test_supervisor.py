"""What stays beside a rank that a launcher has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARTING = """
import os, signal, sys, time
from distconv.job import supervisor
from distconv.files.job_folder import make_folder
from distconv.place import Place


class Ended:
    "A watch over a rank that ends well."

    lost = failed = None

    def __init__(self, processes, *of_rank, **others):
        [self.rank] = processes.values()

    def run(self):
        while self.rank.poll() is None:
            time.sleep(0.01)
        return 0


def notices(meeting):
    print("parting", flush=True)
    time.sleep(60)


def removed(process):
    signal.raise_signal(int(sys.argv[1]))  # as a launcher may ask twice
    remove(process)


remove, supervisor.remove_folders_of = supervisor.remove_folders_of, removed
supervisor.Watch, supervisor._Joining.notices = Ended, notices
signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests' own process may have been told to ignore it
if isinstance(supervisor.supervise_rank(Place(1, 2, 1, mpi=False), captures=False), supervisor.Watcher):
    make_folder()
    os._exit(0)
"""


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_that_is_ended_while_it_parts_leaves_no_folder(asked: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARTING, str(asked.value)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "parting\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(asked)
        assert process.wait(10) == 128 + asked
    assert not list(tmp_path.iterdir())
