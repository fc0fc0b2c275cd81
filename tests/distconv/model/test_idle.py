"""Ranks that idle, since a batch has fewer samples than there are ranks for them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from distconv.model import call_inputs
from distconv.model.parallelize import distributed_script
from distconv.performance.without_data import imagined_job, mesh_of
from distconv.settings.partition import Partition


@pytest.mark.parametrize(
    ("partition", "shape", "working"),
    [
        ("sample=8", (1, 3, 16, 16), 1),
        ("sample=8", (8, 3, 16, 16), 8),
        ("sample=4", (5, 3, 16, 16), 3),  # in twos: 2, 2, 1
        ("sample=2,height=2", (1, 3, 16, 16), 2),
        ("channel=8", (2, 3, 16, 16), 8),  # the first layer alone has fewer channels
        ("height=2,width=4", (2, 3, 16, 3), 6),
    ],
)
def test_ranks_that_hold_a_part(partition: str, shape: tuple[int, ...], working: int) -> None:
    assert call_inputs.working_ranks(Partition.parse(partition).axes, shape) == working


def test_idle_ranks_are_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(call_inputs, "_warned", set())
    with imagined_job(2):
        mesh = mesh_of(Partition.parse("sample=2"))
        for samples in (2, 1, 1):
            call_inputs.warn_of_idle("UNet", mesh, [torch.ones(samples), torch.ones(samples, 3, 4, 4)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distconv: UNet is called with (1, 3, 4, 4): under sample=2 only 1 of 2 ranks have a part")


def test_large_calls_of_modules_without_parameters_are_reported() -> None:
    small, large = torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 2048, 1024, dtype=torch.float64)
    with imagined_job(2), distributed_script(mesh_of(Partition.parse("height=2"))):
        with warnings.catch_warnings(action="error"):
            nn.MaxPool2d(2)(small)
        with pytest.warns(RuntimeWarning, match="MaxPool2d, called at .*, runs whole on every rank: it has no param"):
            nn.MaxPool2d(2)(large)
