"""distconv's own streams and staging on the null card: their results, while the card watches the order of uses."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, missing_for_mpi
from torch import nn

import distconv
from distconv import settings
from distconv.agreement.disagreement import Disagreement
from distconv.model import fully_sharded
from distconv.model.parallelize import distributed_script
from distconv.transfer.group import urgent_group
from distconv.turns import pager


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def ranks(request: pytest.FixtureRequest, card: Any) -> Iterator[Callable[..., Any]]:
    """ranks(function, *args) runs a function on two processes."""
    if request.param == "mpi" and (reason := missing_for_mpi()):
        pytest.skip(reason)
    pool = Ranks(2, request.param)
    yield pool.run
    pool.close()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def script(shift: float, fully: str = "off") -> str | None:
    """Trains for some steps; the line of the disagreement, if there is one. Each rank's data differ by the shift."""
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("height=2", device_type="cuda")
    model = net().cuda()
    x = torch.ones(4, 2, 8, 6).cuda() + shift * torch.distributed.get_rank()
    try:
        with settings.options({"shard_parameters": fully}), distributed_script(mesh):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    except Disagreement as error:
        return str(error)
    return None


def test_ranks_that_agree_train(ranks: Callable[..., Any]) -> None:
    assert ranks(script, 0.0) == ranks(script, 0.0, "on") == [None, None]


def test_what_ranks_disagree_about_is_reported(ranks: Callable[..., Any]) -> None:
    first, second = ranks(script, 1.0)
    assert first == second and first is not None and "(4, 2, 8, 6)" in first


READ = "a stream reads what another one may not have written yet"


def priorities(folder: str) -> dict[str, list[bool]]:
    """Whether halos and other messages of ranks over NCCL, none of which is sent, have a stream of high priority."""
    rank, found = dist.get_rank(), {}
    for setting, partition in (("normal", "height=2"), ("high", "width=2")):
        dist.destroy_process_group()
        dist.init_process_group("nccl", init_method=f"file://{folder}/{setting}", rank=rank, world_size=2)
        mesh = distconv.init(partition, device_type="cuda")
        with settings.options({"halo_priority": setting}):
            groups = urgent_group(mesh, (0,)), mesh.get_group(0)
        backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups if group is not None]
        found[setting] = [backend.options.is_high_priority_stream for backend in backends]
    return found


def test_halos_have_a_stream_of_high_priority(card: Any, tmp_path: Path) -> None:
    pool = Ranks(2, "gloo")
    try:
        assert pool.run(priorities, str(tmp_path)) == 2 * [{"normal": [False, False], "high": [True, False]}]
    finally:
        pool.close()


def planted() -> list[str]:
    """The faults that a rank finds of itself, one of which it makes."""
    import null_card_order as order

    other = torch.cuda.Stream()
    x = torch.ones(100, device="cuda")
    with order.collected() as faults, torch.cuda.stream(other):
        x + 1
    torch.cuda.synchronize()  # else the memory of x would be free while the other stream may still read it
    return faults


def test_faults_of_ranks_are_found(ranks: Callable[..., Any], watched: None) -> None:
    for faults in ranks(planted):
        assert [fault.splitlines()[0] for fault in faults] == [READ]


class TwoStreams(nn.Module):
    """Uses parameters on a stream of its own, which has waited for the other one before they are gathered there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        self.stream = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        y = self.second(self.first(x))
        with torch.cuda.stream(self.stream):
            z = self.third(self.second(self.first(x)))
        torch.cuda.current_stream().wait_stream(self.stream)
        return y + z


def on_two_streams(fully: bool) -> list[str]:
    """The faults of some steps."""
    import null_card_order as order

    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("height=2", device_type="cuda")
    model = distconv.parallelize(TwoStreams().cuda(), mesh, shard_parameters=fully)
    x = distconv.shard(torch.ones(4, 2, 8, 6, device="cuda"), mesh)
    gc.collect()  # else models of earlier tests may be freed within the steps
    torch.cuda.synchronize()
    with order.collected() as faults:
        for _ in range(3):
            model(x).square().mean().backward()
            torch.cuda.synchronize()
    return faults


@pytest.mark.parametrize("fully", [False, True])
def test_streams_of_a_model_wait_for_one_another(fully: bool, ranks: Callable[..., Any], watched: None) -> None:
    assert ranks(on_two_streams, fully) == [[], []]


@pytest.mark.parametrize("memory", [None, 2048])
def test_parts_in_turn_equal_the_whole(memory: int | None, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    plain = net().double().cuda()
    model = distconv.in_turn(copy.deepcopy(plain), "height=4", memory=memory)
    x = torch.randn(2, 2, 16, 12, dtype=torch.float64, device="cuda")
    for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected)
    if memory is not None:
        used = pager.pager_of("cuda")
        assert used.written and used.read


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the parameters."""
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
