"""The database of measured times while its writers are killed, and where it cannot be written: what is lost.

    python benchmarks/database_faults.py             # a hundred kills, about a minute
    python benchmarks/database_faults.py --kills 5   # seconds
    python benchmarks/database_faults.py --save      # keeps table and figures in benchmarks/results

Four processes write rows, each told as committed when `record` has returned. At random moments one of them, or all
four, are killed by signal 9, and others start in their place. A committed row that is not there is *lost*; a row whose
numbers are not those that were written is *wrong*; a *start* fails where a new process cannot write within 20 s, or
warns. Then come single faults: a full disk, files that may only be read, that are another program's, or of another
version, and a clock that is set back. The exit code is 1 where anything is lost, wrong, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import Table, conditions, save, show
from mucudnn.optimizer import Option
from mucudnn.timing.store import Store

WRITERS = 4
START_SECONDS = 20.0
NOBODY = 65534

Row = tuple[int, int]
"""(number of a writer, number of its record)."""


def key(row: Row) -> dict[str, Any]:
    """Of some rows the key is the writer's own; the others share theirs with all writers."""
    writer, count = row
    return {"shared": count} if count % 3 == 0 else {"writer": writer, "count": count}


def options(row: Row) -> list[Option]:
    """What a row holds: numbers that follow from its own, so that wrong ones are known."""
    writer, count = row
    random = Random(writer * 1_000_003 + count)
    size = random.choice((1, 1, 2, 40))  # some transactions are of several pages
    name = f"fft {writer}"
    return [Option(extent + 1, name, random.random(), random.randrange(1 << 40)) for extent in range(size)]


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


def compared(path: Path, committed: list[Row], writers: int) -> tuple[int, int]:
    """How many committed rows are not in a database, and how many rows of it are not what was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(str(path))
        found = {tuple(sorted(known.items())): launches for known, launches in store.contents()}
        store.close()
    told, lost, wrong = set(committed), 0, 0
    for row in committed:
        launches = found.get(tuple(sorted(key(row).items())), [])
        mine = [launch for launch in launches if launch.algorithm == f"fft {row[0]}"]
        lost += not mine
        wrong += bool(mine) and mine != options(row)
    for known, launches in found.items():  # also rows whose writer was killed before it could tell of them
        of = dict(known)
        for writer in {int(launch.algorithm.split()[1]) for launch in launches}:
            row = (writer, of.get("shared", of.get("count", -1)))
            mine = [launch for launch in launches if launch.algorithm == f"fft {writer}"]
            wrong += writer >= writers or dict(key(row)) != of or (row not in told and mine != options(row))
    return lost, wrong


ROW: Row = (0, 1)


def _prepared(path: Path) -> None:
    store = Store(str(path))
    store.record(key(ROW), options(ROW))
    store.close()


def _in_child(action: Callable[[], str]) -> str:
    """What an action says in a process of its own, whose limits and user it may change."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(there, text.encode()[:2000])
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


def _kept_in_memory(path: Path, expected: str, prepare: Callable[[], None]) -> str:
    """One warning, old rows and new ones answered: what is wrong with that, nothing if it is so."""

    def action() -> str:
        prepare()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            store = Store(str(path))
            rows = [(7, count) for count in range(1, 400)]
            for row in rows:
                store.record(key(row), options(row))
            missing = [row for row in [ROW, *rows] if list(store.launches(key(row)).values()) != options(row)]
        lines = [str(each.message) for each in told]
        if missing or len(lines) != 1 or expected not in lines[0] or "\n" in lines[0]:
            return f"{len(missing)} rows are not answered; {len(lines)} warnings {lines[:2]}"
        return ""

    said = _in_child(action)
    if said:
        return said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return "" if list(Store(str(path)).launches(key(ROW)).values()) == options(ROW) else "a committed row is lost"


def full_disk(path: Path) -> str:
    """No file of the process may become larger than 64 KiB."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    _prepared(path)
    return _kept_in_memory(path, "cannot be written", limit)


def full_file_system(path: Path) -> str:
    """A file system of 128 KiB; "not tried" where this process may not mount one."""

    def action() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace, private = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE | MS_REC
        place = str(path.parent).encode()
        if (
            libc.unshare(namespace)
            or libc.mount(None, b"/", None, private, None)
            or libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=128k")
        ):
            return "not tried"
        _prepared(path)
        return _kept_in_memory(path, "cannot be written", lambda: None)

    return _in_child(action)


def read_only(path: Path) -> str:
    """The file and its folder may only be read; by a user who is bound by that."""

    def bound() -> None:
        if os.geteuid() == 0:
            os.seteuid(NOBODY)

    _prepared(path)
    path.parent.chmod(0o555)
    path.chmod(0o444)
    try:
        return _kept_in_memory(path, "cannot be written", bound)
    finally:
        path.parent.chmod(0o755)


def _set_aside(path: Path, reason: str) -> str:
    """The file goes to a new name as it is, with one warning, and rows are kept in a new one."""
    before = path.read_bytes()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _prepared(path)
        answered = list(Store(str(path)).launches(key(ROW)).values()) == options(ROW)
    aside = [other for other in path.parent.iterdir() if ".damaged-" in other.name]
    lines = [str(each.message) for each in told]
    if not answered or [other.read_bytes() for other in aside] != [before]:
        return f"answered: {answered}; set aside: {[other.name for other in aside]}"
    return "" if len(lines) == 1 and reason in lines[0] else f"warnings: {lines}"


def foreign_file(path: Path) -> str:
    """A text file, by another program."""
    path.write_text("a diary\n" * 1000)
    return _set_aside(path, "file is not a database")


def foreign_database(path: Path) -> str:
    """An SQLite database of another program."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE recipes (name TEXT); PRAGMA application_id = 77")
    return _set_aside(path, "another application")


def older_schema(path: Path) -> str:
    """Our own file, of an older version."""
    _prepared(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE needs; PRAGMA user_version = 1")
    return _set_aside(path, "its format is 1")


def clock_set_back(path: Path) -> str:
    """The wall clock goes back by an hour with every look at it, and the file is of tomorrow."""
    _prepared(path)
    hours = iter(range(10**9))
    with mock.patch("time.time", lambda: 2e9 - 3600 * next(hours)), warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(str(path))
        rows = [(1, count) for count in range(30)]
        for row in rows:
            os.utime(path, (4e9 - 1e6 * row[1], 4e9 - 1e6 * row[1]))
            store.record(key(row), options(row))
        store.close()
    lost, wrong = compared(path, [ROW, *rows], 2)
    return f"{lost} lost, {wrong} wrong" if lost or wrong else ""


FAULTS = {
    "a full disk (a limit on the size of files)": full_disk,
    "a full file system of 128 KiB": full_file_system,
    "file and folder read-only": read_only,
    "a text file in its place": foreign_file,
    "another program's database in its place": foreign_database,
    "an older version of its tables": older_schema,
    "a clock that is set back": clock_set_back,
}


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
        save("database-faults", "Faults of the database", f"{__doc__}\n{told}", count | {"faults": said}, shown)
    failed = count["lost"] or count["wrong"] or count["failed starts"] or count["said"]
    return int(bool(failed or any(text not in ("", "not tried") for text in said.values())))


if __name__ == "__main__":
    sys.exit(main())
