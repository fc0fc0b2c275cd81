"""A file that is not right is set aside."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import FFT, GEMM, KEY, garbage, keyed, set_aside

from mucudnn.optimizer import Option
from mucudnn.timing.store import Store


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


@pytest.mark.parametrize("make", [other_application, lambda path: path.write_bytes(b"no database " * 1000)])
def test_a_file_that_is_set_aside_is_not_changed_by_the_journal_of_a_fresh_one(
    path: Path, make: Callable[[Path], object]
) -> None:
    path.parent.mkdir()
    make(path)
    content, fresh = path.read_bytes(), path.with_name("fresh")
    with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as other:
        other.execute("PRAGMA synchronous = OFF")
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE problems (id)")
        path.with_name(f"{path.name}-journal").write_bytes(fresh.with_name("fresh-journal").read_bytes())
    with pytest.warns(RuntimeWarning, match="starts afresh"):
        Store(str(path)).record(KEY, [FFT])
    assert path.with_name(f"{path.name}.damaged-1").read_bytes() == content


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
