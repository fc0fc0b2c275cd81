"""The seconds of reading on a machine of numbers, against hand-made sums."""

from __future__ import annotations

import pytest

from benchmarks.reading.seconds import GB, Job, file_seconds, step_seconds, store_seconds
from distconv.performance.machine import read_machine

GIB = float(1 << 30)


def test_files_are_read_at_the_bandwidth_of_all_or_of_a_node():
    machine, job = read_machine("lassen"), Job(2048, 64, 64, GIB)
    assert job.share == GIB / 32
    assert file_seconds(job, machine, 100 * GB, parts=True) == pytest.approx(64 * GIB / 100e9)
    assert file_seconds(job, machine, 100 * GB, parts=False) == pytest.approx(2048 * GIB / 100e9)
    endless = file_seconds(job, machine, 1e30, parts=True)
    assert endless == pytest.approx(machine.node.ranks * GIB / 32 / machine.network.bandwidth)


def test_a_store_moves_what_others_hold():
    machine = read_machine("lassen")
    assert store_seconds(Job(8, 1, 4, GIB), machine) == 0  # all ranks hold their slab of every sample
    moved = store_seconds(Job(8, 2, 4, GIB), machine) - machine.network.latency
    assert moved == pytest.approx(machine.node.ranks * (GIB / 2) / 2 / machine.network.bandwidth)


def test_the_longer_hides_the_shorter():
    assert (step_seconds(2.0, 1.0), step_seconds(1.0, 2.0)) == (2.0, 2.0)
