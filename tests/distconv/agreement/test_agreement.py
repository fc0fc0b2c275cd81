"""Ranks that hold different tensors end in one line, the same on every rank, before an optimizer steps."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import SCRIPTS, launch
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv.agreement.disagreement import Disagreement
from distconv.model import running
from distconv.model.parallelize import distributed_script

LARGEST = running.LARGEST_PLAIN
PARTITIONS = ["sample=2,height=2", "sample=2,channel=2"]


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def data(count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(count, 2, 8, 6, generator=generator), torch.randint(0, 2, (count, 8, 6), generator=generator)


@contextlib.contextmanager
def ended() -> Iterator[dict[str, Any]]:
    """What became of the steps within: the line of the disagreement, None without one."""
    found: dict[str, Any] = {"line": None}
    try:
        yield found
    except Disagreement as error:
        found["line"] = str(error)


def script(partition: str, choose: Callable[[int, int], Any], *, targets: bool = False, plain: bool = False) -> Any:
    """Trains as a script does. `choose` gives (rank, step) -> the samples of the inputs, or of the targets alone.

    plain: whether the script is given plain results.
    """
    running.LARGEST_PLAIN = LARGEST if plain else -1
    mesh = distconv.init(partition, device_type="cpu")
    model, stepped = net(), 0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = data()
    with ended() as found, distributed_script(mesh):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            chosen = choose(dist.get_rank(), step)
            optimizer.zero_grad()
            result = model(x[:4] if targets else x[chosen])
            loss = nn.functional.cross_entropy(result, y[chosen])
            loss.backward()
            optimizer.step()
            stepped += 1
    whole = distconv.whole_state([parameter.detach() for parameter in model.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))
    return found["line"], stepped, same


def permuted(rank: int, step: int) -> Any:
    return np.random.RandomState(os.getpid()).permutation(16)[:4]


def sampled(rank: int, step: int) -> Any:
    return random.Random(os.getpid()).sample(range(16), 4)


def drawn(rank: int, step: int) -> Any:
    return torch.randint(0, 16, (4,), generator=torch.Generator().manual_seed(os.getpid()))


def listed_from_a_set(rank: int, step: int) -> Any:
    """As list(set(names)) gives it where strings hash differently."""
    names = sorted((f"image{i}" for i in range(8)), key=lambda name: hash((name, rank)))
    return [int(name[5:]) for name in names][:4]


def split(rank: int, step: int) -> Any:
    """As a DistributedSampler and accelerate do."""
    return range(16)[rank::4]


@pytest.mark.parametrize("choose", [permuted, sampled, drawn, listed_from_a_set, split])
def test_inputs_that_differ(ranks: Callable[[int], Ranks], choose: Any) -> None:
    found = ranks(4).run(script, PARTITIONS[0], choose)
    lines = {line for line, _, _ in found}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("input 1 of Sequential.forward, shape (4, 2, 8, 6), torch.float32, at "), line
    assert "test_agreement.py:" in line and "from rank 0. Every rank must have the whole batch" in line
    assert "\n" not in line
    assert [stepped for _, stepped, _ in found] == [0] * 4


def same_at_first(rank: int, step: int) -> Any:
    return [0, 1, 2, 3 + (step == 2 and rank == 3)]


TOLD = {True: "gradient of a result of Sequential, ", False: "target of aten."}
"""How a line begins that tells of targets that differ, by whether the results are plain."""


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("targets, plain", [(False, False), (True, False), (True, True)])
def test_the_step_before_which_they_differ_is_the_last(
    ranks: Callable[[int], Ranks], partition: str, targets: bool, plain: bool
) -> None:
    what = TOLD[plain] if targets else "input 1 of Sequential.forward"
    for line, stepped, same in ranks(4).run(script, partition, same_at_first, targets=targets, plain=plain):
        assert line is not None and "rank 3 differs from rank 0" in line, line
        assert stepped == 2 and not same
        assert line.startswith(what) and "test_agreement.py:" in line, line


def first_target_differs(rank: int, step: int) -> Any:
    return [0, 1, 2, 3 + (rank == 1)]


@pytest.mark.parametrize("plain", TOLD)
def test_a_target_that_differs_at_once_changes_no_parameter(ranks: Callable[[int], Ranks], plain: bool) -> None:
    for line, stepped, same in ranks(4).run(script, PARTITIONS[0], first_target_differs, targets=True, plain=plain):
        assert line is not None and line.startswith(TOLD[plain]) and "rank 1 differs" in line
        assert stepped == 0 and same


def the_same(rank: int, step: int) -> Any:
    return np.random.RandomState(step).permutation(16)[:4]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_is_the_same_trains(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert ranks(4).run(script, partition, the_same) == [(None, 3, False)] * 4


def with_check_off() -> Any:
    os.environ["DISTCONV_CHECK"] = "off"
    try:
        return script(PARTITIONS[0], split)
    finally:
        del os.environ["DISTCONV_CHECK"]


def test_it_can_be_turned_off(ranks: Callable[[int], Ranks]) -> None:
    assert [(line, stepped) for line, stepped, _ in ranks(4).run(with_check_off)] == [(None, 3)] * 4


def written_by_one(norm: Any, _: Any) -> None:
    norm.running_mean.add_(1)


def other(partition: str, what: str) -> Any:
    """Trains for up to 30 steps, in which rank 3 does `what`; the line, and the steps done before it."""
    mesh = distconv.init(partition, device_type="cpu")
    odd, stepped = dist.get_rank() == 3, 0
    x, y = data(4)
    with ended() as found, distributed_script(mesh):
        model = net(seed=5 if odd and what == "weights" else 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if what == "written":
            model[1].register_forward_pre_hook(written_by_one if odd else lambda *_: None)
        for step in range(30):
            if what == "load" and step == 1:
                state = distconv.whole_state(model.state_dict())
                model.load_state_dict({name: value + (odd and "running" in name) for name, value in state.items()})
            if what == "drift" and step == 1 and odd:
                with torch.no_grad():
                    parameter: Any = model[3].weight
                    getattr(parameter, "_local_tensor", parameter)[0, 0] += 1e-6
            optimizer.zero_grad()
            result = model(x)
            if what == "more" and step == 1 and odd:
                result = result * torch.ones(1, 2, 1, 1)
            nn.functional.cross_entropy(result, y).backward()
            optimizer.step()
            stepped += 1
    return found["line"], stepped


@pytest.mark.parametrize("partition", PARTITIONS)
def test_weights_are_compared_before_the_first_step(ranks: Callable[[int], Ranks], partition: str) -> None:
    (line, stepped), *rest = ranks(4).run(other, partition, "weights")
    assert line.startswith("parameter 0.weight of Sequential, shape (4, 2, 3, 3), torch.float32, is not the same"), line
    assert "rank 3 differs from rank 0." in line and stepped == 0 and rest == [(line, 0)] * 3


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_is_loaded_is_compared_at_the_next_call(ranks: Callable[[int], Ranks], partition: str) -> None:
    (line, stepped), *rest = ranks(4).run(other, partition, "load")
    assert line.startswith("buffer 1.running_mean of Sequential, shape (4,), torch.float32, is not the same"), line
    assert "rank 3 differs from rank 0." in line and stepped == 1 and rest == [(line, 1)] * 3


def test_a_buffer_that_a_rank_writes_differently_is_found_before_the_step(ranks: Callable[[int], Ranks]) -> None:
    (line, stepped), *rest = ranks(4).run(other, PARTITIONS[0], "written")
    assert line.startswith("buffer 1.running_mean of Sequential, shape (4,), torch.float32, is not the same"), line
    assert "rank 3 differs from rank 0." in line and stepped == 0 and rest == [(line, 0)] * 3


@pytest.mark.parametrize("partition, alike", [(PARTITIONS[0], 0), (PARTITIONS[1], 1)])
def test_a_parameter_that_drifts_is_found_when_its_turn_comes(
    ranks: Callable[[int], Ranks], partition: str, alike: int
) -> None:
    """On split channels rank 3 has its shard in common with rank 1."""
    (line, stepped), *rest = ranks(4).run(other, partition, "drift")
    assert line.startswith("parameter 3.weight of Sequential, shape (2, 4, 1, 1), torch.float32, is not the same"), line
    assert f"rank 3 differs from rank {alike}." in line
    assert 1 <= stepped <= 4 and rest == [(line, stepped)] * 3


def test_ranks_that_do_not_do_the_same(ranks: Callable[[int], Ranks]) -> None:
    (line, stepped), *rest = ranks(4).run(other, PARTITIONS[0], "more")
    assert line.startswith("the ranks do not do the same: next comes, on ranks 0, 1 and 2: "), line
    assert "; rank 3: other of aten.mul, shape (1, 2, 1, 1), torch.float32, at " in line
    assert stepped == 1 and rest == [(line, 1)] * 3


def one_rank_steps() -> Any:
    """Rank 0 alone steps tensors of its own, when a comparison is to come and when one is under way."""
    mesh = distconv.init(PARTITIONS[0], device_type="cpu")
    x, y = data(4)
    rank, stepped = dist.get_rank(), 0
    probe = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    with ended() as found, distributed_script(mesh):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y.roll(step))
            if rank == 0:
                probe.step()
            loss.backward()
            if rank == 0:
                probe.step()
            optimizer.step()
            stepped += 1
    return found["line"], stepped


def test_one_rank_alone_steps_tensors_of_its_own(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run(one_rank_steps) == [(None, 2)] * 4


def forward_only(end: str) -> Any:
    """Evaluates; at the second of three calls rank 1 has other inputs."""
    running.LARGEST_PLAIN = LARGEST if end == "plain results" else -1
    mesh = distconv.init(PARTITIONS[0], device_type="cpu")
    x, _ = data(4)
    done = 0
    with ended() as found, distributed_script(mesh), torch.no_grad():
        model = net().eval()
        for step in range(3):
            y = model(x + (step == 1 and dist.get_rank() == 1))
            if end == "item":
                y.sum().item()
            elif end == "gather":
                distconv.gather(y)
            done += 1
    return found["line"], done


@pytest.mark.parametrize("end, done", [("plain results", 1), ("item", 1), ("gather", 1), ("the script's end", 3)])
def test_programs_that_only_go_forward(ranks: Callable[[int], Ranks], end: str, done: int) -> None:
    for line, calls in ranks(4).run(forward_only, end):
        assert line is not None and line.startswith("input 1 of Sequential.forward") and calls == done, (line, calls)


def test_a_script_that_seeds_itself_by_its_process_ends_in_one_line() -> None:
    done = launch("alone", 2, "--partition", "height=2", str(SCRIPTS / "reseeded.py"))
    assert done.returncode != 0 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("distconv: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert lines[0].startswith("distconv: input 1 of Conv2d.forward, shape (4, 3, 8, 8), torch.float32, at "), lines
    assert "reseeded.py:19, is not the same on every rank: rank 1 differs from rank 0. Every rank must" in lines[0]
