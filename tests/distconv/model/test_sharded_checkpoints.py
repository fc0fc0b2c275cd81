"""Checkpoints of parameters in shards along all axes: other numbers of ranks load them, and one without distconv."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankDied, Ranks

import distconv
from distconv.model import fully_sharded
from tests.distconv.model.test_fully_sharded import PARTITIONS, network

pytestmark = pytest.mark.gloo


def loaded(folder: str, saves: bool) -> list[bool]:
    """Whether torch.distributed.checkpoint loads what it has saved, under another partition and without distconv.

    ``saves``: here, before; else other ranks have.
    """
    fully_sharded.LEAST_BYTES = 0
    first, second = (
        distconv.parallelize(network(""), distconv.init(partition, device_type="cpu"), shard_parameters=True)
        for partition in PARTITIONS[1:]
    )
    if saves:
        dcp.save({"model": first.state_dict()}, checkpoint_id=folder)
    found = []
    for net, without in ((second, False), (network("hooked"), True)):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        state = {"model": net.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=without)
        net.load_state_dict(state["model"])
        whole = distconv.whole_state(net.state_dict())
        found.append(all(torch.equal(whole[name], value) for name, value in network("").state_dict().items()))
    return found


def test_checkpoints_of_torch(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(4).run(loaded, str(tmp_path / "checkpoint"), True) == [[True, True]] * 4


def killed(folder: str) -> None:
    """The second of the ranks dies while they write a second checkpoint, beside the first."""
    fully_sharded.LEAST_BYTES = 0
    net = distconv.parallelize(network(""), distconv.init("height=2", device_type="cpu"), shard_parameters=True)
    dcp.save({"model": net.state_dict()}, checkpoint_id=f"{folder}/first")
    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    dcp.save({"model": net.state_dict()}, checkpoint_id=f"{folder}/second")


def test_a_checkpoint_of_two_ranks_is_whole_for_four_though_one_died(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    with pytest.raises(RankDied, match="rank 1 died"):
        ranks(2).run(killed, str(tmp_path))
    assert not (tmp_path / "second" / ".metadata").exists()
    assert ranks(4).run(loaded, str(tmp_path / "first"), False) == [[True, True]] * 4
