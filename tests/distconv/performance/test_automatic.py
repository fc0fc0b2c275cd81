"""A partition chosen on this machine: what it is measured to do, what a script trains, and the run that follows."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import ENVIRONMENT, SCRIPTS
from torch import nn

from distconv import settings
from distconv.commands.run import _chosen
from distconv.model.choosing import Answer
from distconv.performance.automatic import decide
from distconv.performance.calibration import _line
from distconv.performance.choice import PartitionPlanner
from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.performance.first_call import ModelCall, NoModel, first_call
from distconv.performance.kept import Kept
from distconv.performance.kernels import Measured, prepared
from distconv.performance.layers import trace
from distconv.performance.machine import machine_toml, parse, read_machine
from distconv.performance.recording import on_meta, record_step
from distconv.performance.without_data import imagined_job, mesh_of
from distconv.settings.partition import Partition
from tests.forked_python import forked_python, run_python

MATRIX = Shape((8, 8), (8, 1), torch.float32)


def test_a_machine_written_is_the_machine_read() -> None:
    rounded = parse(machine_toml(read_machine("lassen")))
    assert rounded.device.memory == pytest.approx(16 * 2**30, rel=1e-3)
    assert parse(machine_toml(rounded)) == rounded


@pytest.mark.parametrize("latency", [0.0, 2e-5])
def test_latency_and_bandwidth_of_a_line(latency: float) -> None:
    sizes = [3 * size for size in (256, 2**16, 2**22)]
    found = _line(sizes, [3 * latency + size / 1e9 for size in sizes], 3)
    assert found[0] == pytest.approx(latency, abs=1e-12) and found[1] == pytest.approx(1e9)


def test_a_kernel_is_measured_once_for_all() -> None:
    """A transposed and an expanded matrix among its arguments: they are made as they were recorded."""
    transposed, expanded = replace(MATRIX, strides=(1, 8)), replace(MATRIX, strides=(0, 1))
    calls = []

    def operator(*tensors: torch.Tensor, out: float) -> torch.Tensor:
        calls.append([x.stride() for x in tensors])
        return tensors[0] @ tensors[1]

    kernel = Kernel("product", 0, 0, KernelCall(operator, (transposed, expanded), (("out", 1.0),)))
    kept = Kept()
    seconds = Measured(1, kept)(kernel)
    assert seconds is not None and seconds > 0
    assert calls[0] == [(1, 8), (0, 1)]
    count = len(calls)
    assert Measured(1, kept)(kernel) == seconds and len(calls) == count
    assert Measured(1, kept)(Kernel("unknown", 1, 1)) is None


def test_a_machine_takes_what_is_measured_and_the_roofline_elsewhere() -> None:
    machine = replace(read_machine("lassen"), measured=lambda kernel: 7.0 if kernel.name == "known" else None)
    assert machine.kernel_seconds(Kernel("known", 10, 10)) == 7.0
    assert machine.kernel_seconds(Kernel("other", 0, 0)) == machine.device.kernel


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)], (2, 3, 16, 16)),
        (lambda: [nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4, affine=True)], (2, 1, 6, 8, 6)),
    ],
)
def test_every_kernel_of_a_step_can_be_run_again(build: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> None:
    """The norm's statistics are detached in place, which torch does to no tensor but the step's own."""
    with imagined_job(2):
        step = record_step(on_meta(lambda: nn.Sequential(*build())), mesh_of(Partition.parse("height=2")), shape)
    measured = Measured(1, Kept())
    kernels = [event for event in step.events if isinstance(event, Kernel)]
    assert len(kernels) > 10 and all((measured(kernel) or 0) > 0 for kernel in kernels)


def test_a_call_in_inference_is_recorded_without_backward() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout()))
    with imagined_job(2):
        both = [
            record_step(model, mesh_of(Partition.parse("height=2")), (2, 3, 8, 8), trains=each)
            for each in (True, False)
        ]
    trained, inferred = ({event.name for event in step.events if isinstance(event, Kernel)} for step in both)
    assert any("backward" in name or "dropout" in name for name in trained)
    assert inferred and not any("backward" in name or "dropout" in name for name in inferred)
    assert both[0].saved > 0 and both[1].saved == 0


@pytest.mark.parametrize(
    ("threads", "takes"),
    [(1, "distconv.onednn_convolution.default"), (None, "aten.convolution.default")],
)
def test_the_kernels_recorded_are_those_that_a_rank_takes(threads: int | None, takes: str) -> None:
    """Torch gives the volume to oneDNN, and so does the rule with half of it, for which torch has another kernel."""
    model = on_meta(lambda: nn.Conv3d(16, 16, 3, padding=1))
    before = torch.get_num_threads()
    with imagined_job(2, threads):
        step = record_step(model, mesh_of(Partition.parse("depth=2")), (1, 16, 40, 40, 12), wants_gradient=True)
    assert torch.get_num_threads() == before
    kernels = [event for event in step.events if isinstance(event, Kernel) and "convolution" in event.name]
    assert kernels[0].name == takes
    # Forward, dL/dx and dL/dweight: 27 products for each of 16 channels and each output, those of the halo's too.
    once = 2 * 27 * 16 * 16 * 20 * 40 * 12
    assert 3 * once <= sum(kernel.flops for kernel in kernels) <= 3.3 * once
    if threads is not None:
        again = pickle.loads(pickle.dumps(kernels[0].call))
        assert prepared(again)().shape == (1, 16, 20, 40, 12)


class Both(nn.Module):
    """Takes an image, and a number for each channel of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.numbers = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(5, 8)
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.image(x) + self.numbers(numbers)[:, :, None, None])


def test_a_model_of_two_inputs_is_planned() -> None:
    called = first_call(lambda: Both()(torch.ones(4, 3, 16, 16), torch.ones(4, 5)))
    model, shapes = called.model.to("meta"), called.shapes
    assert shapes == ((4, 3, 16, 16), (4, 5))
    graph = trace(model, *shapes)
    assert graph.input == (4, 3, 16, 16) and graph.first == ["image", "numbers"] and graph.last == "head"
    found = [Partition.parse(text) for text in ("sample=4", "height=4", "channel=4")]
    with imagined_job(4):
        plan = PartitionPlanner(model, graph, found, read_machine("lassen")).best()
    assert plan.times.total > 0 and set(plan.layers) == {"image", "numbers", "model#1", "head"}


def test_parameters_are_sharded_where_they_fit_no_rank_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights and Adam's states are 1.2 MB. Where nothing fits, as one planning shows, the choice has no limit."""
    model, shape = on_meta(lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))), (4, 64, 8, 8)
    machine, call = read_machine("lassen"), ModelCall(model, (shape,), trains=True)
    found, planners, chosen = [Partition.parse("sample=4")], [], []
    monkeypatch.setattr(
        PartitionPlanner, "_costs", lambda *of, real=PartitionPlanner._costs: planners.append(1) or real(*of)
    )
    for memory in (1e9, 1e6, 1e3):
        small = replace(machine, device=replace(machine.device, memory=memory))
        choice = decide(call, trace(model, shape), found, small, machine, may_be_one=False)
        chosen.append((choice.shard_parameters, len(planners)))
        planners.clear()
    assert chosen == [(False, 1), (True, 2), (False, 1)]


def test_the_first_call_of_a_model_in_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    note = tmp_path / "note.txt"

    def script() -> None:
        note.write_text("started")
        nn.Flatten()(torch.randn(2, 3))
        model.eval()(torch.randn(1, 3, 8, 8))
        with torch.no_grad():
            model.train()(torch.randn(1, 3, 8, 8))
        try:
            model(torch.randn(4, 3, 16, 16))
        except Exception:
            pytest.fail("the script has caught what ends it")

    assert first_call(script) == ModelCall(model, ((4, 3, 16, 16),), trains=True)
    assert not note.exists()


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_the_first_call_in_inference(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that no other one calls, on numbers; a script that goes on calling it is ended."""
    monkeypatch.setattr("distconv.performance.first_call.PATIENCE", patience)
    model, calls = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3)), nn.ReLU()).eval(), []
    model.register_forward_hook(lambda *_: calls.append(1))

    @torch.no_grad()
    def script() -> None:
        nn.Embedding(4, 4)(torch.zeros(1, dtype=torch.long))
        for _ in range(3):
            model(torch.randn(1, 3, 16, 16))

    assert first_call(script) == ModelCall(model, ((1, 3, 16, 16),), trains=False)
    assert len(calls) == (3 if patience else 0)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (lambda: None, "ends before it calls a model$"),
        (lambda: sys.exit(0), "ends before it calls a model$"),
        (lambda: os.remove("/no/such/file"), r"calls a model with FileNotFoundError: .*/no/such/file' \(.*\.py:\d+\)$"),
        (
            lambda: nn.Bilinear(2, 2, 2)(torch.ones(2), torch.ones(2)),
            r"Bilinear is called with torch.float32 \(2,\), torch.float32 \(2,\); accepted",
        ),
        (lambda: Both()(torch.ones(2, 3, 8, 8), [1]), "Both is called with torch.float32 .*, list; accepted"),
    ],
)
def test_a_script_without_such_a_model_is_one_line(script, complaint: str) -> None:
    with pytest.raises(NoModel, match=complaint):
        first_call(script)


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = [forked_python(), "-m", "distconv", "run", *options, str(SCRIPTS / "chosen.py")]
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_script_runs_under_what_is_chosen(tmp_path: Path) -> None:
    plain = run_python(SCRIPTS / "chosen.py", cwd=tmp_path, env=ENVIRONMENT)
    os.remove(tmp_path / "starts.txt")
    done = run(tmp_path, "--partition", "auto", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert [*map(float, done.stdout.split())] == pytest.approx([*map(float, plain.stdout.split())], abs=3e-6)
    assert "measuring this machine with 2 ranks, once" in done.stderr
    assert "ms a step" in done.stderr and "one process" in done.stderr
    assert (tmp_path / "starts.txt").read_text() == "started\n"
    machine = parse((tmp_path / "cache" / "mucudnn" / "machine.toml").read_text())
    assert machine.node.ranks == 2 and machine.host.operator > 0 and machine.network.bandwidth > 0


def test_ranks_that_are_started_shard_parameters_where_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distconv.commands.run.ask", lambda *_, **__: Answer({"*": "sample=2"}, "", True))
    options = argparse.Namespace(strategy=None, nproc=2, module=False, script="", arguments=[], batch_norm="global")
    with _chosen(options):
        assert settings.value("shard_parameters")
    assert not settings.value("shard_parameters")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--partition", "auto", "--strategy", "s.toml"), "leave out --strategy"),
        (("--partition", "automatic"), "automatic"),
    ],
)
def test_what_leaves_nothing_to_choose_is_one_line(tmp_path: Path, options: tuple[str, ...], complaint: str) -> None:
    done = run(tmp_path, *options)
    assert done.returncode == 2
    assert complaint in done.stderr and done.stderr.count("\n") == 1
