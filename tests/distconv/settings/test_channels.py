from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from distconv.model.parameters import parameter_placements
from distconv.settings.channels import (
    Block,
    ChannelMap,
    block,
    check_algorithm,
    moved_channels,
    weight_boxes,
    weight_dims,
)
from distconv.settings.partition import Partition

LAYERS = st.builds(
    lambda channels, filters, groups, transposed: ChannelMap(channels * groups, filters * groups, groups, transposed),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
)
AXES = st.sampled_from([{"channel": 2}, {"channel": 3}, {"channel": 2, "filter": 2}, {"filter": 4}, {"channel": 7}])


def blocks(layer: ChannelMap, algorithm: str, axes: dict[str, int]) -> list[Block]:
    sizes = tuple(axes.values())
    return [block(layer, box) for box in weight_boxes(layer, weight_dims(layer, algorithm, axes), sizes)]


@given(LAYERS, st.sampled_from(["x", "y", "w", "auto"]), AXES)
def test_all_runs_of_all_blocks_are_the_products_of_the_layer(
    layer: ChannelMap, algorithm: str, axes: dict[str, int]
) -> None:
    """Every (channel, filter) pair of one group is multiplied on exactly one rank, and no other pair is."""
    times = torch.zeros(layer.channels, layer.filters, dtype=torch.int64)
    for one in blocks(layer, algorithm, axes):
        for run in one.runs:
            channels = torch.arange(*one.channels)[slice(*run.channels)].chunk(run.groups)
            filters = torch.arange(*one.filters)[slice(*run.filters)].chunk(run.groups)
            for some, others in zip(channels, filters, strict=True):
                times[some[:, None], others[None, :]] += 1
    expected = torch.block_diag(
        *[torch.ones(layer.channels // layer.groups, layer.filters // layer.groups)] * layer.groups
    )
    assert torch.equal(times, expected.long())


@given(LAYERS, st.sampled_from(["x", "y", "w"]), AXES)
def test_runs_follow_the_weight(layer: ChannelMap, algorithm: str, axes: dict[str, int]) -> None:
    dims, sizes = weight_dims(layer, algorithm, axes), tuple(axes.values())
    for one, box in zip(blocks(layer, algorithm, axes), weight_boxes(layer, dims, sizes), strict=True):
        ends = [run.weight for run in one.runs]
        assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
        if ends:
            assert (ends[0][0], ends[-1][1]) == (0, box[0][1] - box[0][0])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_moved_positions_are_those_of_the_formulas(ranks: int) -> None:
    layer = ChannelMap(12 * ranks, 24 * ranks)
    assert moved_channels(layer, (1,), (ranks,)) == (
        0,
        (ranks - 1) * 24 * ranks,
    )
    assert moved_channels(layer, (0,), (ranks,)) == (
        (ranks - 1) * 12 * ranks,
        0,
    )
    # On channel x filter x is gathered over one axis only; y also changes sides of the grid.
    channels, filters = moved_channels(layer, (1, 0), (ranks, ranks))
    assert channels == (ranks - 1) * layer.channels
    assert filters <= ranks * layer.filters


def test_depthwise_moves_nothing_and_straddling_groups_little() -> None:
    assert moved_channels(ChannelMap(8, 16, 8), (0,), (4,))[0] == 0
    layer = ChannelMap(6, 6, 2)  # channels 0-2, 3-5 on ranks 0-1, 2-3, 4-5
    assert [one.channels for one in blocks(layer, "x", {"channel": 3})] == [(0, 3), (0, 6), (3, 6)]
    assert moved_channels(layer, (0,), (3,))[0] == 1 + 4 + 1


@pytest.mark.parametrize(
    "layer, chosen",
    [
        (ChannelMap(256, 256), 1),  # x, moves 2 F
        (ChannelMap(64, 256), 0),  # y, moves 3 C
        (ChannelMap(256, 64), 1),
        (ChannelMap(3, 64, scale=0.25), 0),
        (ChannelMap(64, 64, 64), 0),
        (ChannelMap(256, 256, transposed=True), 0),
        (ChannelMap(64, 256, transposed=True, scale=4.0), 1),
    ],
)
def test_auto_moves_least(layer: ChannelMap, chosen: int) -> None:
    assert weight_dims(layer, "auto", {"channel": 4}) == (chosen,)


def test_parameters_of_modules() -> None:
    partition = Partition.parse("sample=2,channel=2,filter=2")
    whole, vector = (Replicate(),) * 3, (Replicate(), Shard(0), Shard(0))
    conv = parameter_placements(nn.Conv2d(4, 8, 3), "w", partition)
    assert conv == {"weight": (Replicate(), Shard(1), Shard(0)), "bias": vector}
    transposed = parameter_placements(nn.ConvTranspose2d(4, 8, 3), "w", partition)
    assert transposed == {"weight": (Replicate(), Shard(0), Shard(1)), "bias": vector}
    assert parameter_placements(nn.Linear(4, 8), "y", partition)["weight"] == vector
    assert parameter_placements(nn.BatchNorm2d(4), "auto", partition) == {"weight": vector, "bias": vector}
    assert parameter_placements(nn.LayerNorm(4), "auto", partition) == {"weight": whole, "bias": whole}
    assert parameter_placements(nn.PReLU(), "auto", partition) == {"weight": whole}
    assert parameter_placements(nn.Sequential(nn.Linear(2, 2)), "auto", partition) == {}


@pytest.mark.parametrize(
    "algorithm, partition, fault",
    [
        ("z", "channel=2", "channel algorithm 'z': accepted: x, y, w, auto"),
        ("w", "channel=2", "channel algorithm 'w' on partition 'channel=2': accepted with axes channel and filter"),
    ],
)
def test_an_algorithm_that_cannot_be_is_one_line(algorithm: str, partition: str, fault: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_algorithm(algorithm, Partition.parse(partition))
    assert str(raised.value) == fault
