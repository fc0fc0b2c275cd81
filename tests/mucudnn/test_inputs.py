"""The whole inputs of a network: told by one sample or by the whole, for every command alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mucudnn.networks import Shape, whole_inputs
from mucudnn.program import NotFound

CONV1, CONV2, CONV3 = (lambda k=kind: k(3, 4, 1) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d))


@pytest.mark.parametrize(
    ("build", "given", "batch", "whole"),
    [
        (CONV2, (3, 8, 8), None, (32, 3, 8, 8)),
        (CONV2, (3, 8, 8), 4, (4, 3, 8, 8)),
        (CONV2, (6, 3, 8, 8), None, (6, 3, 8, 8)),
        (CONV2, (6, 3, 8, 8), 6, (6, 3, 8, 8)),
        (CONV3, (3, 8, 8, 8), None, (32, 3, 8, 8, 8)),
        (CONV3, (6, 3, 8, 8, 8), None, (6, 3, 8, 8, 8)),
        (CONV1, (3, 8), None, (32, 3, 8)),
        (CONV1, (6, 3, 8), None, (6, 3, 8)),
    ],
)
def test_a_sample_or_the_whole(build: Callable[[], nn.Module], given: Shape, batch: int | None, whole: Shape) -> None:
    with torch.device("meta"):
        assert whole_inputs(build(), [given], batch, 32) == (whole,)


@pytest.mark.parametrize(("given", "batch"), [((6, 3, 8, 8), 4), ((4, 8, 8), None), ((1, 4, 8, 8), None)])
def test_what_a_network_does_not_take_is_one_line(given: Shape, batch: int | None) -> None:
    with torch.device("meta"), pytest.raises(NotFound) as raised:
        whole_inputs(CONV2(), [given], batch, 32)
    line = str(raised.value)
    assert line.startswith("Conv2d does not take --input ") and "; as one sample: " in line and "\n" not in line
