"""The measured curves of `benchmarks/prediction/clusters.py`: which epochs of which jobs count."""

from __future__ import annotations

import pytest

from benchmarks.prediction.clusters import FASTER, LARGE, Epoch, epochs, faster_epochs, measurements


def test_the_faster_half_of_a_job_counts_and_what_ran_beside_it_is_told() -> None:
    """The small job is slow while the large one runs; of the large one every epoch has the small one beside it."""
    small = [Epoch(16, 100, 0, 50), Epoch(16, 100, 50, 100), Epoch(16, 100, 100, 120), Epoch(16, 100, 120, 140)]
    large = [Epoch(128, 20, 10, 40), Epoch(128, 20, 40, 80)]
    alone = [Epoch(1, 10, 200, 210), Epoch(1, 10, 210, 220)]
    found = faster_epochs({16: small, 128: large, 1: alone})
    assert found == [(16, 5.0, []), (128, pytest.approx(20 / 30), [16]), (1, 1.0, [])]


def test_the_epochs_of_the_published_logs() -> None:
    jobs = epochs()
    assert list(jobs) == [2**power for power in (*range(9), 10)] and {len(each) for each in jobs.values()} == {9}
    assert all(epoch.seconds > 0 and epoch.steps > 0 for each in jobs.values() for epoch in each)
    # 1,281,167 images, 64 for each GPU and step.
    assert all(abs(epoch.steps * 64 * gpus - 1_281_167) < 64 * gpus for gpus, each in jobs.items() for epoch in each)
    found = {gpus: (rate, beside) for curve, gpus, rate, beside in measurements() if curve == FASTER}
    assert found[1][0] == pytest.approx(5.45, abs=0.02) and found[1024] == (pytest.approx(4.26, abs=0.05), [])
    assert found[16][1] == found[32][1] == [] and LARGE == 16
    assert 16 in found[128][1] and 16 in found[256][1]
