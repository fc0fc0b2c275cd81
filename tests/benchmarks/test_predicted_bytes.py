"""What the performance model says a step sends is what the distributed benchmark has counted on real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

import distconv
from benchmarks.distributed.cases import CASES
from benchmarks.distributed.channels import BATCH, KERNEL
from benchmarks.table import RESULTS
from distconv.performance.events import RecordedStep, Start
from distconv.performance.recording import on_meta, record_step
from distconv.performance.without_data import imagined_job, mesh_of
from distconv.settings.partition import Partition
from mucudnn.architectures.resnet import ResNet

COUNTED: dict[str, Any] = json.loads((RESULTS / "distributed-cpu.json").read_text())


def bytes_of(step: RecordedStep, *kinds: str) -> list[int]:
    return [event.bytes for event in step.events if isinstance(event, Start) and event.kind in kinds]


def test_every_case_was_counted() -> None:
    assert {(row["case"], row["ranks"]) for row in COUNTED["traffic"]} == {(name, n) for name in CASES for n in (2, 4)}


@pytest.mark.parametrize("row", COUNTED["traffic"], ids=lambda row: f"{row['case']} on {row['ranks']}")
def test_messages_of_a_case(row: dict[str, Any]) -> None:
    case = CASES[row["case"]]
    with imagined_job(row["ranks"]) as rank:
        mesh = mesh_of(Partition.parse(case.partitions[row["ranks"]]))
        step = record_step(on_meta(case.build), mesh, case.shape, wants_gradient=case.input_gradient)
    halos, gradients = bytes_of(step, "all_to_all"), bytes_of(step, "all_reduce", "gradients")
    counted = row["of_ranks"][rank]
    assert [len(halos), sum(halos)] == counted["all_to_all"]
    assert [len(gradients), sum(gradients)] == counted["all_reduce"]
    # A real step also compares checksums, 20 bytes; what is predicted is the table of all ranks.
    gathered, (calls, moved) = bytes_of(step, "all_gather"), counted["all_gather"]
    assert [1 + len(gathered), 20 + sum(gathered) // row["ranks"]] == [calls, moved]
    assert set(counted) == {"all_to_all", "all_reduce", "all_gather"}


@pytest.mark.parametrize("row", COUNTED["wide"], ids=lambda row: row["partition"])
def test_allreduces_of_gradients(row: dict[str, Any]) -> None:
    with imagined_job(4) as rank:
        model = on_meta(lambda: ResNet(width=16, width_factor=4))
        step = record_step(model, mesh_of(Partition.parse(row["partition"])), (4, 3, 64, 64))
    assert sum(bytes_of(step, "gradients")) == row["reduced"][rank]


SYMMETRIC = [row for row in COUNTED["channels"] if row["algorithm"] != "w"]
OTHERS = [row for row in COUNTED["channels"] if row["algorithm"] == "w"]


def sent_by_a_rank(row: dict[str, Any], of_layer: bool, rank: int | None = None) -> int:
    """Bytes of a layer whose channels are split.

    of_layer: the algorithm is said by a strategy, and the mesh has one that moves something else.
    """
    channels, filters, size = row["layer"]
    algorithm = row["algorithm"]
    strategy = {"*": f"{row['partition']},algorithm={algorithm}"} if of_layer else None
    other = {"x": "y", "y": "x", "w": "y", "auto": "x" if 2 * filters > 3 * channels else "y"}[algorithm]
    with imagined_job(row["ranks"], rank=rank):
        of_mesh = other if of_layer else algorithm
        mesh = distconv.init(row["partition"], device_type="cpu", channel_algorithm=of_mesh)
        layer = on_meta(lambda: nn.Conv2d(channels, filters, KERNEL, padding=KERNEL // 2, bias=False))
        shape = (BATCH, channels, size, size)
        events = record_step(layer, mesh, shape, strategy=strategy, wants_gradient=True).events
        return sum(sum(event.sent) if event.sent else event.bytes for event in events if isinstance(event, Start))


@pytest.mark.parametrize("of_layer", [False, True], ids=["mesh", "layer"])
@pytest.mark.parametrize("row", SYMMETRIC, ids=lambda row: f"{row['layer']} {row['partition']} {row['algorithm']}")
def test_messages_of_split_channels(row: dict[str, Any], of_layer: bool) -> None:
    """What all ranks sent was counted. Under x and y, each sends as much as any other."""
    assert sent_by_a_rank(row, of_layer) * row["ranks"] == row["sent"]


def sent_under_w(rank: int) -> list[int]:
    return [sent_by_a_rank(row, of_layer, rank) for row in OTHERS for of_layer in (False, True)]


def test_messages_of_channels_and_filters_split() -> None:
    """Under w ranks differ. This process is each of them in turn, and nothing that it plans is another one's."""
    ranks = [sent_under_w(rank) for rank in range(4)]
    assert [sum(sent) for sent in zip(*ranks, strict=True)] == [row["sent"] for row in OTHERS for _ in (False, True)]
