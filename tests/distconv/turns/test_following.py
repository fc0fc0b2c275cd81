"""What is told before parts run in turn is what they then take and move."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distconv
from benchmarks.networks import NETWORKS
from distconv import settings
from distconv.__main__ import main
from distconv.rules.whole import MOST_BYTES
from distconv.settings.partition import Partition
from distconv.tensors.memory import TensorMemory
from distconv.turns import following, pager, turning
from distconv.turns.following import follow_call
from distconv.turns.parts import parts_of
from tests.forked_python import run_python

LIMIT = 1 << 21


def decoder() -> nn.Module:
    up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), up, nn.Conv2d(16, 3, 3, padding=1))


VOLUMES = "benchmarks.demo.unet3d:UNet3d"

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, bool]] = {
    "a decoder": (decoder, (1, 4, 192, 192), "height=8", False),
    "a volume's training step": (lambda: NETWORKS["unet3d"].small().build(), (1, 1, 32, 32, 32), "depth=4", True),
    "a residual network's training step": (
        lambda: NETWORKS["resnet18"].small().build(),
        (2, 3, 128, 128),
        "height=4",
        True,
    ),
}


class Counted(TorchDispatchMode):
    """The most bytes of tensors alive, of those that have not left."""

    def __init__(self, limit: int, model: nn.Module, *given: Tensor) -> None:
        super().__init__()
        self.limit, self.memory, self.peak = limit, TensorMemory(), 0
        gc.collect()
        self.before = pager.pager_of("cpu").away  # of earlier tests
        self.memory.count([*model.parameters(), *model.buffers(), *given])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not nn.Parameter for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.memory.count(tree_leaves(result))
        self.peak = max(self.peak, self.memory.now - pager.pager_of("cpu").away + self.before)
        return result


@pytest.mark.parametrize("limit", [LIMIT, 1 << 17])
@pytest.mark.parametrize("name", CASES)
def test_what_is_followed_is_what_runs(name: str, limit: int) -> None:
    build, shape, text, backward = CASES[name]
    torch.manual_seed(0)
    model, x, partition = build().float(), torch.randn(shape), Partition.parse(text)
    turned = distconv.in_turn(copy.deepcopy(model), text, memory=limit)
    with torch.set_grad_enabled(backward):
        told = follow_call(model, (x,), {}, partition, limit, backward)
        right = model(x)
        ran, before = pager.pager_of("cpu"), parts_of(partition, "cpu").pending.moved
        ran.written = ran.read = 0
        with Counted(limit, turned, x) as counted:
            y = turned(x)
            if backward:
                (y * 1).sum().backward()
    torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4)  # nothing without numbers is left
    assert told.exchanged == parts_of(partition, "cpu").pending.moved - before
    assert (told.spilled, told.fetched) == (ran.written, ran.read)
    assert told.peak == pytest.approx(counted.peak, rel=0.02)


class Divided(nn.Linear):
    """Divides its weight by the weight's norm in every call, in place or by an assignment."""

    is_assigned = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_assigned:
            self.weight.data = self.weight.data / self.weight.data.norm()
        else:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
        return super().forward(x)


def divided(is_assigned: bool = False) -> nn.Module:
    last = Divided(4, 2)
    last.is_assigned = is_assigned
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


class Padded(nn.Conv2d):
    """Multiplies by a slice of a new tensor, so large that distconv makes it when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[0], 1, x.shape[2], MOST_BYTES, dtype=x.dtype)
        return super().forward(x * ones[..., : x.shape[3]])


class Halved(nn.Conv2d):
    """Multiplies its weight in place in every call."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight *= 0.5
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        pytest.param(divided, torch.float64, id="a changed parameter"),
        # A part changes the kernel after the part before has kept it for backward.
        pytest.param(lambda: nn.Sequential(Halved(1, 2, 1), nn.Conv2d(2, 2, 3)), torch.float64, id="a changed kernel"),
        pytest.param(lambda: Padded(1, 2, 3, padding=1), torch.float64, id="a slice of a new tensor"),
        pytest.param(lambda: divided(is_assigned=True), torch.float64, id="an assigned parameter"),
        pytest.param(lambda: nn.Conv2d(1, 2, 3, padding=1, dtype=torch.cdouble), torch.cdouble, id="complex numbers"),
    ],
)
def test_a_step_is_followed(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model, x, partition = build().to(dtype), torch.randn(1, 1, 8, 4, dtype=dtype), Partition.parse("height=2")
    told = follow_call(model, (x,), {}, partition, backward=True)
    pending = parts_of(partition, "cpu").pending
    before = pending.moved
    distconv.in_turn(model, "height=2")(x).abs().sum().backward()
    assert told.exchanged == pending.moved - before > 0


def main_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.argv", ["distconv", "check", *arguments])
    return main()


def test_the_command_reports_on_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    network = [VOLUMES, "--input", "1,1,32,32,32", "--parts", "depth=4", "--inference"]
    assert main_of(network, monkeypatch) == 0
    assert "depth=4, in turn: the tensors take at most" in capsys.readouterr().out


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
head = nn.Linear(4, 2)
print("begins")
with torch.no_grad():
    net(torch.ones(1, 1, 128, 128))
for step in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 1, 128, 128)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""


def checked(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What `distconv check --parts height=4` tells of a script."""
    return run_python("-m", "distconv", "check", "--parts", "height=4", *options, script)


def test_a_scripts_calls_are_reported_before_they_are_computed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    told = checked(script)
    assert told.returncode == 0, told.stderr
    assert "step" not in told.stdout  # the script ends with its first optimizer step
    assert told.stdout.count("Sequential, height=4, in turn: the tensors take at most") == 2
    infers, trains = json.loads(checked(script, "--memory", "256KiB", "--json").stdout.partition("\n")[2])
    assert infers["inputs"] == [[1, 1, 128, 128]] and trains["inputs"] == [[2, 1, 128, 128]]
    assert trains["followed"]["spilled"] > 0 and trains["alone"]["operations"] > 2 * infers["alone"]["operations"]


def test_a_script_that_fails_or_has_nothing_to_cut(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)")
    told = checked(script)
    assert told.returncode == 0 and "No model of the script can be cut as height=4" in told.stdout
    script.write_text("raise OSError('no data')")
    told = checked(script)
    assert told.returncode == 1 and "ended with OSError: no data (at " in told.stderr
    assert checked(tmp_path / "absent.py").returncode == 2


def test_the_first_of_several_ranks_is_followed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = [VOLUMES, "--input", "1,1,32,32,32", "--json", "--inference"]
    found = []
    for options in (["--partition", "depth=2", "--parts", "depth=2"], ["--parts", "depth=4"]):
        assert main_of([*network, *options], monkeypatch) == 0
        found.append(json.loads(capsys.readouterr().out))
    halves, alone = found
    assert halves["parts"] == "depth=2" and halves["ranks"] == "depth=2" and alone["ranks"] is None
    # The first two of four parts, of which the second one has a neighbour on the other rank.
    assert halves["operations"] == alone["operations"] / 2
    assert 0 < halves["sent"] < halves["exchanged"] < alone["exchanged"] and not alone["sent"]
    assert halves["peak"] - halves["whole"] < 0.7 * (alone["peak"] - alone["whole"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--partition", "filter=4"], "'filter' would cut parameters"),
        (["--partition", "auto"], "accepted: both named"),
        (["--partition", "depth=2", "--halo", "chain"], "begin with a second call"),
        (["--strategy", "layers.toml"], "--parts with --channel-algorithm or --strategy"),
        (["--memory", "much"], "accepted: bytes"),
    ],
)
def test_what_is_not_accepted(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main_of([VOLUMES, "--input", "1,1,32,32,32", "--parts", "depth=4", *more], monkeypatch) == 2
    assert said in capsys.readouterr().err


class Gridded(nn.Module):
    """Adds a grid, which it has, or which it makes in its first call and keeps, of 2 MiB."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.grid = nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, 512, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None:
            self.grid = torch.arange(1 << 19).float().view(1, 1, 512, 1024)
        return self.conv(x) + self.grid[..., :1, :1]


@pytest.mark.parametrize(("width", "most"), [(1024, 5 << 20), (256, 2 << 20), (0, 20 << 20)])
def test_parts_share_large_tensors_that_a_model_has(width: int, most: int) -> None:
    model, x, before = Gridded(width), torch.ones(1, 1, 64, 64), []

    class Watched(TensorMemory):
        def count(self, results: Any) -> None:
            super().count(results)
            before.append(self.now)

    with mock.patch.object(following, "TensorMemory", Watched):
        follow_call(model, (x,), {}, Partition((("height", 8),)), backward=True)
    assert before[-1] < most  # Each part would have a copy in backward, and what it has made in forward besides.


class Scaled(nn.Module):
    """Two convolutions. It may ask for a number between them, or hold what cannot be copied."""

    def __init__(self, asks: bool, held: object = None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.asks, self.held = asks, held

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y * 2 if self.asks and y.abs().max().item() > 0 else y)


@pytest.mark.parametrize("kind", ["followed", "asks for a number", "cannot be copied"])
def test_a_fault_in_following_a_call_for_its_chains_is_reported_once(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turning, "_reported", set())
    plain = Scaled(kind == "asks for a number").double()
    model = copy.deepcopy(plain)
    model.held = threading.Lock() if kind == "cannot be copied" else None
    x = torch.randn(1, 2, 24, 5, dtype=torch.float64)
    with settings.options({"halo": "chain"}):
        distconv.in_turn(model, "height=2")
        for size in (24, 20):  # of another kind is followed again
            torch.testing.assert_close(model(x[:, :, :size]), plain(x[:, :, :size]))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (kind == "cannot be copied")
    assert all("Scaled could not be followed" in line and "TypeError: cannot pickle" in line for line in lines)


def test_a_call_that_fails_raises_its_own_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    model = distconv.in_turn(Scaled(False), "height=2")
    with settings.options({"halo": "chain"}), pytest.raises(RuntimeError, match="Invalid channel dimensions"):
        model(torch.ones(1, 3, 24, 5))
    assert capfd.readouterr().err == ""
