"""A database in places that cannot be written or read."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import FFT, GEMM, KEY, garbage, keyed

from mucudnn.optimizer import Option
from mucudnn.timing.store import Counts, Store


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
