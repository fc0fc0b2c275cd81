"""A store by itself: what it keeps, forgets and counts; and the texts of the setting."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from distconv.reading.source import Raw, Source
from distconv.reading.store import PartStore
from distconv.settings import SETTINGS, StoreOption


def raw(path: Path) -> Raw:
    return Raw(str(path), "", (4, 300), np.dtype("u1"), 0, "C")


def whole(store: PartStore, source: Source, rows: range) -> np.ndarray:
    with store.of((0, rows.start)):
        part = store.part(source, (rows, range(300)))
    store.end_batch({(0, rows.start)})
    return part


def test_a_file_that_is_replaced_is_read_anew(tmp_path):
    path, store = tmp_path / "v.raw", PartStore(1 << 20)
    first = np.arange(1200, dtype="u1").reshape(4, 300)
    first.tofile(path)
    assert np.array_equal(whole(store, raw(path), range(0, 2)), first[:2]) and store.bytes == 600
    whole(store, raw(path), range(0, 2))
    assert store.bytes_read == 600
    (first + 1).tofile(tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert store.parts_of([(0, 0)]) == []
    assert np.array_equal(whole(store, raw(path), range(0, 2)), first[:2] + 1)
    assert store.bytes == 600 and store.bytes_read == 1200 and len(store.parts_of([(0, 0)])) == 1


def test_crops_that_change_are_given_up(tmp_path):
    path, store = tmp_path / "v.raw", PartStore(1 << 20)
    np.arange(1200, dtype="u1").tofile(path)
    for stop in (2, 3, 4):
        whole(store, raw(path), range(0, stop))
    assert store.bytes == 0 and store.bytes_read == 300 * 9


@pytest.mark.parametrize(
    ("text", "gib", "disk"),
    [("memory", None, False), ("memory=2.5", 2.5, False), ("memory+disk", None, True), ("memory=8+disk", 8.0, True)],
)
def test_what_store_accepts(text, gib, disk):
    assert SETTINGS["store"].parse(text) == StoreOption(gib, disk)


@pytest.mark.parametrize("text", ["", "disk", "memory=", "memory=-1", "memory=2GB", "on"])
def test_what_store_refuses(text):
    with pytest.raises(ValueError, match="accepted is memory, memory=GIB, memory\\+disk"):
        SETTINGS["store"].value("--store", text)
