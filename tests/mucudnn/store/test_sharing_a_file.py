"""The database of times in several processes, threads and forks."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import FFT, GEMM, KEY, keyed, set_aside

from mucudnn.optimizer import Option
from mucudnn.timing import store as store_module
from mucudnn.timing.store import Counts, Store

ROOT = Path(__file__).parents[2]


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
    ends = [process.communicate(timeout=240) for process in running]
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


def test_what_is_recorded_later_is_known_at_once_and_written_soon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PERIOD", 0.05)
    store, written = Store(str(path)), threading.Event()
    record = store._record
    monkeypatch.setattr(store._deferred, "_write", lambda *row: (record(*row), written.set()))
    store.record_later(KEY, [FFT])
    assert store.launches(KEY) == keyed(FFT) and store.contents()[0][1] == [FFT]
    assert written.wait(30) and Store(str(path)).launches(KEY) == keyed(FFT)
    store.record_later(KEY, [GEMM])
    if not (child := os.fork()):  # what waits is the parent's to write
        os._exit(len(store._deferred.rows()))
    assert os.waitpid(child, 0)[1] == 0
    store.close()
    assert Store(str(path)).launches(KEY) == keyed(FFT, GEMM)


def test_a_call_does_not_wait_for_another_process_that_writes(path: Path) -> None:
    store = Store(str(path))
    store.record(KEY, [FFT])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    began = time.perf_counter()
    store.record_later(KEY, [GEMM])
    assert time.perf_counter() - began < 1
    other.execute("ROLLBACK")
    other.close()
    store.close()
    assert Store(str(path)).launches(KEY) == keyed(FFT, GEMM)
