"""The database of times: what it keeps, for whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_cases import FFT, GEMM, KEY, keyed

from mucudnn.optimizer import Option
from mucudnn.settings import MEMORY
from mucudnn.timing.store import Counts, Store


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
