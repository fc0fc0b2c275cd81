"""Parts in turn in a program that has process groups of its own, and parts whose state cannot be exchanged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distconv
from distconv.job.one_process import one_process
from distconv.turns.module_state import ModuleState


def test_parts_keep_their_groups_when_a_program_destroys_its_own() -> None:
    plain, x = nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=2,width=2")
    right = plain(x)
    torch.testing.assert_close(turned(x), right)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.new_group([0])
            torch.testing.assert_close(turned(x), right)
        finally:
            dist.destroy_process_group()
        torch.testing.assert_close(turned(x), right)


class Synchronized(nn.Module):
    """Adds its statistics up over all processes, if there are any, as layers with codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        mean = y.detach().sum((0, 2, 3))
        if dist.is_initialized():
            dist.all_reduce(mean)
            dist.barrier()
            every = [torch.zeros_like(mean) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mean)
            mean = sum(every) * (1 + dist.get_rank())
        self.mean.add_(mean)
        return y


@pytest.mark.parametrize("has_group", [False, True])
def test_a_model_sees_one_process_within_parts(has_group: bool) -> None:
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, x = Synchronized().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
        turned = distconv.in_turn(copy.deepcopy(plain), "height=2,width=2")
        torch.testing.assert_close(turned(x), plain(x))
        torch.testing.assert_close(turned.mean, plain.mean)
        assert dist.is_initialized() == has_group
    finally:
        if has_group:
            dist.destroy_process_group()


def test_a_model_sees_one_process_behind_a_script_that_did() -> None:
    distconv.shutdown()  # so that the first parts are made within the script
    with one_process():
        distconv.in_turn(nn.Conv2d(1, 1, 3, padding=1), "height=2")(torch.ones(1, 1, 4, 4))
    test_a_model_sees_one_process_within_parts(has_group=False)


@pytest.mark.parametrize("name", ["arrive", "leave"])
def test_an_error_while_state_is_exchanged_ends_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turned, x = distconv.in_turn(nn.Conv2d(1, 1, 3, padding=1), "height=2"), torch.ones(1, 1, 4, 4)
    right = turned(x)

    def fail(state: ModuleState, part: int | None) -> None:
        (_ for _ in ()).throw(KeyError(part))  # not by a statement of the program

    with monkeypatch.context() as failing, pytest.raises(KeyError):
        failing.setattr(ModuleState, name, fail)
        turned(x)
    torch.testing.assert_close(turned(x), right)


def test_models_run_in_parts_again_after_a_shutdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distconv.in_turn(nn.Conv2d(1, 1, 3, padding=1), "height=2")(torch.ones(1, 1, 4, 4))
    distconv.shutdown()
    test_an_error_while_state_is_exchanged_ends_the_call("arrive", monkeypatch)
    distconv.shutdown()
    fitted = distconv.fit(nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))), "40KiB")
    with torch.no_grad():
        fitted(torch.ones(1, 2, 32, 32))
    assert "Sequential runs in parts " in capsys.readouterr().err
