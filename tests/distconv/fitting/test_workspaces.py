"""What a call within a limit of all memory leaves for the workspaces of its convolutions."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

import distconv
import mucudnn
from distconv.fitting.choice import MARGIN, Fit
from distconv.fitting.timeline import Storage, Timeline
from distconv.fitting.workspaces import Workspaces, workspaces_within
from distconv.settings.partition import Partition

# A forward convolution of 30 bytes, whose kernel takes 5 more; then its backward beside a gradient of 10 bytes.
TIMELINE = Timeline(
    seconds=[1.0, 1.0],
    scratch=[5, 0],
    forward_tick=[0, 0],
    storages={0: Storage(100, -1), 1: Storage(30, 0), 2: Storage(10, 1)},
    convolutions=[(0, "forward"), (1, "backward")],
    forward=1,
    initial=100,
)


def test_what_is_left_is_that_of_each_moment() -> None:
    assert workspaces_within(TIMELINE, Fit(140, 1.0), 200) == Workspaces({"forward": 65, "backward": 60}, 60)
    segments = Fit(120, 1.5, peaks=((0, 120),))
    assert workspaces_within(TIMELINE, segments, 200 * MARGIN) == Workspaces({"forward": 80, "backward": 80}, 80)
    parts = Fit(150, 2.0, partition=Partition.parse("height=2"))
    assert workspaces_within(TIMELINE, parts, 200 * MARGIN) == Workspaces(None, 50)
    assert workspaces_within(TIMELINE, parts, 100) == Workspaces(None, 0)
    assert workspaces_within(TIMELINE, Fit(140, 1.0), math.inf).others > 1 << 60


def test_convolutions_of_a_step_use_what_is_left() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Conv2d(8, 8, 5, padding=2) for _ in range(4))).double()
    x = torch.randn(8, 8, 32, 32, dtype=torch.float64)

    def limits(memory: int) -> list[float]:
        with mucudnn.patched(
            workspace_limit="unlimited", planning="ahead", database=":memory:", progress="off"
        ) as session:
            model = distconv.fit(copy.deepcopy(plain), memory)
            model(x).square().sum().backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
            # The first record may be of what times the device.
            return [record.limit for record in session.records() if record.problem.w_shape == (8, 8, 5, 5)]

    plain(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.zero_grad()
    much, little = limits(64 << 20), limits(8 << 20)
    assert 20 << 20 < min(much) <= max(much) < 64 << 20
    assert little and max(little) <= 8 << 20
