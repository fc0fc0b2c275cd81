"""The database of times: what it keeps, for whom, and what happens to a file that is not right."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mucudnn.optimizer import Option
from mucudnn.settings import MEMORY
from mucudnn.timing.store import Counts, Store

ROOT = Path(__file__).parents[2]
KEY: dict[str, Any] = {"direction": "forward", "x": (3, 64, 64), "groups": 1, "device": "cpu"}
FFT = Option(16, "fft", 0.25, 1 << 20)
GEMM = Option(16, "gemm", 0.5, 4096)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "times.sqlite"


@pytest.fixture(autouse=True)
def no_unexpected_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def keyed(*options: Option) -> dict[tuple[str, int], Option]:
    return {(option.algorithm, option.extent): option for option in options}


def set_aside(path: Path) -> list[Path]:
    return sorted(other for other in path.parent.iterdir() if ".damaged-" in other.name)


@pytest.mark.parametrize("memory", [False, True], ids=["file", "memory"])
def test_rows_come_back_by_key(path: Path, memory: bool) -> None:
    store = Store(MEMORY if memory else str(path))
    assert store.launches(KEY) == {}
    store.record(KEY, [FFT])
    store.record(KEY, [GEMM, Option(8, "fft", 0.125, 1 << 19)])
    store.record(KEY | {"groups": 3}, [Option(16, "fft", 9.0, 9)])
    assert store.launches(KEY) == keyed(FFT, GEMM, Option(8, "fft", 0.125, 1 << 19))
    assert store.counts() == Counts(problems=2, launches=4)
    assert store.persistent is not memory


def test_a_key_is_its_content(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    assert store.launches(dict(reversed(KEY.items())) | {"x": [3, 64, 64]}) == keyed(FFT)
    for name in KEY:
        assert store.launches(KEY | {name: "other"}) == {}
        assert store.launches({other: value for other, value in KEY.items() if other != name}) == {}


def test_a_new_measurement_replaces_the_old(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT, GEMM])
    again = Option(16, "fft", 0.75, 8)
    store.record(KEY, [again])
    assert Store(str(path)).launches(KEY) == keyed(again, GEMM)


def test_contents(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT, GEMM])
    assert store.contents() == [(KEY | {"x": [3, 64, 64]}, [FFT, GEMM])]


def test_a_closed_store_opens_again(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    store.close()
    assert store.launches(KEY) == keyed(FFT)


def test_the_path_is_kept_when_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("times.sqlite")
    monkeypatch.chdir("/")
    store.record(KEY, [FFT])
    assert (tmp_path / "times.sqlite").exists()


# Processes and threads.

WRITER = """
import os, sys, warnings
from mucudnn.timing.store import Store
from mucudnn.optimizer import Option
path, me, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = Store(path)
print("ready", flush=True)
sys.stdin.readline()
for i in range(rounds):
    store.record({"shared": i}, [Option(me + 1, "fft", me, i)])
    assert ("fft", me + 1) in store.launches({"shared": i})
print("done", flush=True)
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
"""


def processes(path: Path, count: int, rounds: int, *flags: str) -> list[tuple[int, str]]:
    """Exit code and stderr of `count` processes that write to the path, started at one moment."""
    # The package itself is left out, so that a writer starts without importing torch.
    bare = "import sys, types; p = sys.modules['mucudnn'] = types.ModuleType('mucudnn'); p.__path__ = ['mucudnn']\n"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", bare + WRITER, str(path), str(me), str(rounds), *flags],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(count)
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=120) for process in running]
    return [(process.returncode, stderr) for process, (_, stderr) in zip(running, ends, strict=True)]


def test_processes_write_at_once(path: Path) -> None:
    assert processes(path, count=6, rounds=20) == [(0, "")] * 6
    assert Store(str(path)).counts() == Counts(problems=20, launches=120)


def test_nothing_is_lost_when_a_run_is_killed(path: Path) -> None:
    assert processes(path, 1, 3, "die") == [(-9, "")]
    assert Store(str(path)).counts() == Counts(problems=3, launches=3)


def test_processes_that_find_a_damaged_file_at_once_share_one_fresh_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    ends = processes(path, count=6, rounds=5)
    assert [code for code, _ in ends] == [0] * 6
    assert sum("starts afresh" in stderr for _, stderr in ends) == 1
    assert [other.read_bytes() for other in set_aside(path)] == [b"no database " * 1000]
    assert Store(str(path)).counts() == Counts(problems=5, launches=30)


def test_threads_write_at_once(path: Path) -> None:
    store = Store(str(path))

    def write(me: int) -> None:
        for i in range(10):
            store.record({"shared": i}, [Option(me + 1, "fft", 1.0, 0)])
            store.launches({"shared": i})

    threads = [threading.Thread(target=write, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counts() == Counts(problems=10, launches=40)


def in_fork(action: Callable[[], bool]) -> bool:
    """Whether the action holds in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while hypothesis or torch have threads
        child = os.fork()
    if child == 0:
        try:
            code = 0 if action() else 1
        except BaseException:
            code = 2
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_opens_the_file_for_itself(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    with store._lock:  # as a thread that the fork leaves behind would hold it

        def child() -> bool:
            store.record(KEY, [GEMM])
            return store.launches(KEY) == keyed(FFT, GEMM)

        assert in_fork(child)
    assert store.launches(KEY) == keyed(FFT, GEMM)


# Files that are not right.


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def other_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE launches (name TEXT)")
        connection.execute("PRAGMA application_id = 12345")
    connection.close()


def without_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE problems (name TEXT)")
    connection.close()


def ours(path: Path, statement: str) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(statement)
    connection.close()


def other_version(path: Path) -> None:
    ours(path, "PRAGMA user_version = 99")


def lost_table(path: Path) -> None:
    ours(path, "DROP TABLE launches")


def torn_page(path: Path) -> None:
    store = Store(str(path))
    for i in range(200):
        store._memory[f'{{"i":{i}}}'] = keyed(FFT)
    store.record(KEY, [Option(i + 1, "fft", 1.0, 0) for i in range(2000)])
    store.close()
    content = bytearray(path.read_bytes())
    assert len(content) > 5 * 4096
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)


def truncated(path: Path) -> None:
    torn_page(path)
    os.truncate(path, 6000)


DAMAGE = [garbage, other_application, without_application, other_version, lost_table, torn_page, truncated]


@pytest.mark.parametrize("first", ["record", "launches"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_right_is_set_aside(path: Path, damage: Callable[[Path], None], first: str) -> None:
    path.parent.mkdir()
    damage(path)
    before = path.read_bytes()
    store = Store(str(path))
    with pytest.warns(RuntimeWarning, match="starts afresh") as told:
        if first == "record":
            store.record(KEY, [FFT])
        assert store.launches(KEY) == (keyed(FFT) if first == "record" else {})
        store.record(KEY, [FFT, GEMM])
    assert len(told) == 1 and "\n" not in str(told[0].message)
    (aside,) = set_aside(path)
    assert aside.read_bytes() == before and str(aside) in str(told[0].message)
    assert Store(str(path)).launches(KEY) == keyed(FFT, GEMM)


def test_an_impossible_row(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("INSERT INTO launches VALUES (1, 'gemm', 64, -1, 0)")
    connection.close()
    with pytest.warns(RuntimeWarning, match="CHECK constraint failed"):
        assert store.launches(KEY) == {}
    assert len(set_aside(path)) == 1


def test_setting_aside_overwrites_nothing(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"first " * 100, b"second " * 100):
        path.write_bytes(content)
        with pytest.warns(RuntimeWarning, match="starts afresh"):
            Store(str(path)).record(KEY, [FFT])
    assert [other.read_bytes()[:5] for other in set_aside(path)] == [b"first", b"secon"]


def test_a_write_ahead_log_goes_with_its_foreign_file(path: Path) -> None:
    path.parent.mkdir()
    owner = sqlite3.connect(path, isolation_level=None)
    owner.execute("PRAGMA journal_mode = WAL")
    owner.execute("CREATE TABLE theirs (name TEXT)")
    owner.execute("INSERT INTO theirs VALUES ('precious')")
    with pytest.warns(RuntimeWarning, match="another application"):
        Store(str(path)).record(KEY, [FFT])
    assert not any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-shm"))
    with contextlib.closing(sqlite3.connect(path.with_name(path.name + ".damaged-1"))) as aside:
        assert aside.execute("SELECT name FROM theirs").fetchall() == [("precious",)]
    owner.close()


def test_a_file_damaged_while_open(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    path.write_bytes(b"overwritten " * 2000)
    with pytest.warns(RuntimeWarning, match="starts afresh") as told:
        store.record(KEY, [GEMM])
    assert len(told) == 1
    assert store.launches(KEY) == keyed(GEMM) == Store(str(path)).launches(KEY)


def test_an_empty_file_is_taken(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    Store(str(path)).record(KEY, [FFT])
    assert Store(str(path)).launches(KEY) == keyed(FFT)


# Places that cannot be written.


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory, with this process bound by its permissions even when it was started by root."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    user = os.geteuid()
    if user == 0:
        os.chown(directory, 65534, -1)
        os.seteuid(65534)
    yield directory
    os.seteuid(user)
    directory.chmod(0o700)
    shutil.rmtree(directory)


def serves_from_memory(store: Store, known: dict[tuple[str, int], Option]) -> None:
    with pytest.warns(RuntimeWarning, match="kept in memory") as told:
        assert store.launches(KEY) == known
        store.record(KEY, [GEMM])
        store.record(KEY, [GEMM])
        assert store.launches(KEY) == known | keyed(GEMM)
        assert store.counts() == Counts(1, len(known) + 1)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert not store.persistent


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    serves_from_memory(Store(str(tmp_path / "file" / "below" / "times.sqlite")), {})


def test_a_directory_that_cannot_be_written(unprivileged: Path) -> None:
    unprivileged.chmod(0o500)
    serves_from_memory(Store(str(unprivileged / "times.sqlite")), {})


def test_a_path_that_is_a_directory(tmp_path: Path) -> None:
    serves_from_memory(Store(str(tmp_path)), {})


@pytest.mark.parametrize("directory_mode", [0o500, 0o700])
def test_a_file_that_can_only_be_read_still_answers(unprivileged: Path, directory_mode: int) -> None:
    path = unprivileged / "times.sqlite"
    Store(str(path)).record(KEY, [FFT])
    path.chmod(0o400)
    unprivileged.chmod(directory_mode)
    serves_from_memory(Store(str(path)), keyed(FFT))


def test_a_file_in_a_directory_that_can_only_be_read_still_answers(unprivileged: Path) -> None:
    path = unprivileged / "times.sqlite"
    Store(str(path)).record(KEY, [FFT])
    unprivileged.chmod(0o500)
    serves_from_memory(Store(str(path)), keyed(FFT))


def test_a_file_that_cannot_be_read(unprivileged: Path) -> None:
    path = unprivileged / "times.sqlite"
    Store(str(path)).record(KEY, [FFT])
    path.chmod(0)
    serves_from_memory(Store(str(path)), {})


def test_a_damaged_file_that_cannot_be_set_aside(unprivileged: Path) -> None:
    path = unprivileged / "times.sqlite"
    garbage(path)
    before = path.read_bytes()
    unprivileged.chmod(0o500)
    serves_from_memory(Store(str(path)), {})
    assert path.read_bytes() == before


def test_a_file_locked_for_too_long(path: Path) -> None:
    store = Store(str(path), patience=0.05)
    store.record(KEY, [FFT])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    serves_from_memory(store, keyed(FFT))
    other.close()


def test_a_full_disk(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    connection = store._connected()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    many = [Option(i + 1, "gemm", 1.0, 0) for i in range(3000)]
    with pytest.warns(RuntimeWarning, match="disk is full"):
        store.record(KEY, many)
    assert store.launches(KEY) == keyed(FFT, *many)
    assert Store(str(path)).launches(KEY) == keyed(FFT)
