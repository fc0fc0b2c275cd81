"""The database of measured times while its writers are killed, and where it cannot be written: what is lost.

    python benchmarks/faults/database_faults.py             # a hundred kills, about a minute
    python benchmarks/faults/database_faults.py --kills 5   # seconds
    python benchmarks/faults/database_faults.py --save      # keeps table and figures in benchmarks/results

Four processes write rows, each told as committed when `record` has returned. At random moments one of them, or all
four, are killed by signal 9, and others start in their place. A committed row that is not there is *lost*; a row whose
numbers are not those that were written is *wrong*; a *start* fails where a new process cannot write within 20 s, or
warns. Then come single faults: a full disk, files that may only be read, that are another program's, or of another
version, and a clock that is set back. The exit code is 1 where anything is lost, wrong, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.database_rows import Row, compared, key, options
from benchmarks.faults.database_spoilt import FAULTS
from benchmarks.table import Table, conditions, save, show
from mucudnn.timing.store import Store

WRITERS = 4
START_SECONDS = 20.0


def write(path: Path, writer: int, told: int) -> None:
    """Writes rows for ever, and tells the number of each when it is committed; what fails, as a line."""
    warnings.simplefilter("error")
    store, count = Store(str(path)), 0
    while True:
        try:
            store.record(key((writer, count)), options((writer, count)))
        except BaseException as error:
            os.write(told, f"failed: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.write(told, f"{count}\n".encode())
        count += 1


class Writer:
    """A process that writes, and what it has told."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._read, told = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(target=write, args=(path, number, told))
        self.process.start()
        os.close(told)
        self._text = b""

    def committed(self, end: bool = False) -> list[str]:
        """What it has told so far; ``end``: wait for its end."""
        os.set_blocking(self._read, end)
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self._read, 1 << 16):
                self._text += some
        return self._text.decode().splitlines()

    def kill(self) -> list[str]:
        """Ends it by signal 9; what it had told until then."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        told = self.committed(end=True)
        os.close(self._read)
        return told


def started(writer: Writer) -> bool:
    """Whether a new writer has committed something in time."""
    end = time.monotonic() + START_SECONDS
    while not writer.committed() and time.monotonic() < end:
        time.sleep(0.002)
    return bool(writer.committed()) and "failed" not in writer.committed()[0]


def killed(path: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills so many writers at random moments; counts of what was committed, lost, wrong, and of starts that failed."""
    random = Random(seed)
    count = {"kills": 0, "committed": 0, "lost": 0, "wrong": 0, "failed starts": 0}
    said: list[str] = []
    committed: list[Row] = []

    def end(writer: Writer) -> None:
        for line in writer.kill():
            if line.startswith("failed"):
                said.append(line)
            else:
                committed.append((writer.number, int(line)))

    writers = [Writer(path, number) for number in range(WRITERS)]
    count["failed starts"] += sum(not started(writer) for writer in writers)
    number = WRITERS
    while count["kills"] < kills:
        time.sleep(random.expovariate(1 / 0.02))
        doomed = list(range(WRITERS)) if random.random() < 0.1 else [random.randrange(WRITERS)]
        doomed = doomed[: kills - count["kills"]]
        for index in doomed:
            end(writers[index])
            count["kills"] += 1
        for index in doomed:
            writers[index] = Writer(path, number)
            number += 1
            count["failed starts"] += not started(writers[index])
    for writer in writers:
        end(writer)
    lost, wrong = compared(path, committed, number)
    count |= {"committed": len(committed), "lost": lost, "wrong": wrong}
    aside = [other.name for other in path.parent.iterdir() if ".damaged-" in other.name]
    return count | {"said": [*said, *aside][:5]}


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder that every user may read."""
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="writers to kill (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write table and figures to benchmarks/results")
    chosen = parser.parse_args()
    told = conditions()
    with folder() as place:
        count = killed(place / "times.sqlite", chosen.kills, chosen.seed)
    said = {}
    for name, fault in FAULTS.items():
        with folder() as place:
            said[name] = fault(place / "times.sqlite")
    rows = [(name, text or "as it should be") for name, text in said.items()]
    counted = [(name, str(value)) for name, value in count.items() if name != "said"]
    shown = [
        Table("Writers killed by signal 9", ("what", "number"), counted),
        Table("Single faults", ("fault", "outcome"), rows),
    ]
    show(shown)
    for line in count["said"]:
        print(line)
    if chosen.save:
        save("database-faults", "Faults of the database", f"{__doc__}\n{told}", shown)
    failed = count["lost"] or count["wrong"] or count["failed starts"] or count["said"]
    return int(bool(failed or any(text not in ("", "not tried") for text in said.values())))


if __name__ == "__main__":
    sys.exit(main())
