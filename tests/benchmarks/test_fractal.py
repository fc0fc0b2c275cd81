"""The benchmark of fractals: its volumes, its score, and its script on ranks."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy
import pytest
import torch

from benchmarks.fractal.fractal import PARTITIONS, Arm, Run, failures, losses_differ, table, train, write
from benchmarks.fractal.prediction import predict
from benchmarks.fractal.unet import Fractals, UNet, dice, overlap, predicted
from benchmarks.fractal.volumes import FRACTALS, Scenes, System
from tests.forked_python import forked_python

HALVES = [[0.5 if row == column else 0.0 for column in range(3)] for row in range(3)]
CORNERS = [corner for corner in itertools.product((0.0, 1.0), repeat=3) if sum(corner) % 2]


def test_maps_to_every_other_corner_of_a_cube_make_a_sierpinski_tetrahedron() -> None:
    """At every scale the bits of a cell's three coordinates have an odd sum: 4 ** 4 of 16³, and a few at the edges."""
    maps = numpy.array([numpy.column_stack([HALVES, corner]) for corner in CORNERS])
    voxels = System(maps).voxels(16, numpy.random.default_rng(0))
    odd = ((voxels[:, :, None] >> numpy.arange(4) & 1).sum(1) % 2 == 1).all(1)
    assert odd.sum() == len(numpy.unique(voxels[odd], axis=0)) == 4**4 and len(voxels) < 1.05 * 4**4


def test_the_same_seed_makes_the_same_volumes_and_voxels_have_their_categorys_colour() -> None:
    volume, mask = Scenes(16, 3, 0.0, seed=1).scene(2)
    again = Scenes(16, 3, 0.0, seed=1).scene(2)
    other = Scenes(16, 3, 0.0, seed=1).scene(3)[1]
    assert (volume == again[0]).all() and (mask == again[1]).all() and (mask != other).any()
    held = numpy.unique(mask)
    assert held[0] == 0 and 2 <= len(held) <= FRACTALS + 1
    assert (volume[:, mask == 0] == 0).all()
    for category in held[1:]:
        assert len(numpy.unique(volume[:, mask == category], axis=1).T) == 1


def test_the_score_is_the_mean_dice_of_the_categories() -> None:
    mask = torch.tensor([0, 1, 1, 2]).view(1, 1, 1, 4)
    scores = torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 2]), 3).T.reshape(1, 3, 1, 1, 4).double()
    assert dice(overlap(predicted(scores), mask)).item() == pytest.approx(2 / 3)
    missing = overlap(predicted(torch.nn.functional.pad(scores, [0, 0] * 3 + [0, 1], value=-1)), mask)
    assert dice(missing).item() == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", forked_python())
    data = tmp_path / "fractals.zarr"
    write(data, "--size", "8", "--volumes", "6")
    assert Fractals(data)[5][0].shape == (3, 8, 8, 8) and len(Fractals(data)) == 6
    small = "--width", "4", "--epochs", "2", "--dtype", "float64"
    one, two = train(1, data, *small), train(2, data, *small)
    assert len(one.losses) == 4 and losses_differ(one, two) < 1e-12
    assert one.dice == pytest.approx(two.dice, abs=1e-12) and len(set(one.losses)) == 4


def test_losses_that_differ_in_float64_and_a_dice_that_is_not_reached_fail() -> None:
    run = Run([2.0, 1.0], [0.5, 0.96], [3.0, 7.0])
    early = Run([2.0], [0.5], [3.0])
    off = Run([2.0, 1.0 + 1e-8], [0.5, 0.96], [3.0, 6.0])
    assert failures([Arm(1, run, run), Arm(2, run, run)], 0.95) == []
    assert failures([Arm(1, run, run), Arm(2, early, run), Arm(4, run, off)], 0.95) == [
        "2 ranks: no Dice of 0.95",
        "4 ranks: losses in float64 are off by 1.0e-08",
    ]
    shown = table("", [Arm(1, run, run), Arm(4, off, off)], 0.95)
    assert shown.rows[1] == (
        f"4 ranks, {PARTITIONS[4]}",
        "6",
        "2",
        "2",
        "0.9600",
        "1.0000",
        "0.0e+00",
        "1.0e-08",
        "1.0e-08",
    )


def test_a_volume_on_more_gpus_takes_less_of_each() -> None:
    one, four = predict(32, 1), predict(32, 4)
    assert one.exposed == 0 < four.exposed and four.memory < one.memory and one.fits
    assert one.memory > 4 * 4 * sum(p.numel() for p in UNet().parameters())
