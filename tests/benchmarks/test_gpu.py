"""benchmarks/gpu/gpu.py without a GPU: its units, its way of going on, its errors, and one layer on the host."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.bench import DeviceLost, is_done, run
from benchmarks.gpu.cases import DEEPBENCH, MIB, REQUIRED, LayersError, LayerUnit, alexnet, read_layers
from benchmarks.gpu.gpu import arguments, main, mebibytes, units
from benchmarks.gpu.plans import Plans, described
from benchmarks.harness import Records
from mucudnn.optimizer import Division, Option
from tests.forked_python import run_python

ROOT = Path(__file__).resolve().parents[2]
TINY = ",".join(REQUIRED) + "\n4,2,16,16,3,5,5,2,2,1,1\n"


def asked(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    return units(arguments())


# Layers


def test_the_tables_that_come_with_it() -> None:
    layers = read_layers(DEEPBENCH)
    assert len(layers) == 29
    assert {layer.input[0] for layer in layers} == {256}
    assert {layer.weight[2:] for layer in layers} == {(3, 3), (5, 5)}
    assert [layer.input for layer in alexnet()][1] == (256, 64, 27, 27)


def test_a_table_with_groups_and_dilation(tmp_path: Path) -> None:
    file = tmp_path / "layers.csv"
    file.write_text(f"{','.join(REQUIRED)},groups,dilation_w\n2,4,9,9,6,3,3,0,1,1,2,2,3\n2,4,9,9,6,3,3,0,1,1,2,2,3\n")
    (layer,) = read_layers(file)  # twice the same is one
    assert (layer.input, layer.weight, layer.groups) == ((2, 4, 9, 9), (6, 2, 3, 3), 2)
    assert (layer.stride, layer.padding, layer.dilation) == ((1, 2), (0, 1), (1, 3))


HEAD = ",".join(REQUIRED)
WRONG_TABLES = {
    "no heading": ("4,2,16,16,3,5,5,2,2,1,1\n", "the first line lacks batch"),
    "unknown heading": (f"{HEAD},colour\n", "the first line has 'colour'"),
    "empty": ("", "the first line lacks"),
    "no layer": (f"{HEAD}\n", "there is no layer in it"),
    "a word": (f"{HEAD}\n4,two,16,16,3,5,5,2,2,1,1\n", "line 2: in_channels='two': accepted is a number from 1"),
    "zero": (f"{HEAD}\n4,2,16,16,3,5,5,2,2,0,1\n", "line 2: stride_h='0': accepted is a number from 1"),
    "too few": (f"{HEAD}\n4,2\n", "line 2: accepted are as many numbers as there are headings"),
    "too many": (f"{HEAD}\n4,2,16,16,3,5,5,2,2,1,1,7\n", "line 2: accepted are as many"),
    "kernel too large": (f"{HEAD}\n4,2,3,3,3,5,5,0,0,1,1\n", "line 2: input (4, 2, 3, 3)"),
    "groups": (f"{HEAD},groups\n4,3,16,16,3,5,5,2,2,1,1,2\n", "line 2: input (4, 3, 16, 16) does not have"),
}


@pytest.mark.parametrize("what", WRONG_TABLES)
def test_a_wrong_table_is_one_line(what: str, tmp_path: Path) -> None:
    text, said = WRONG_TABLES[what]
    file = tmp_path / "layers.csv"
    file.write_text(text)
    with pytest.raises(LayersError) as raised:
        read_layers(file)
    assert said in str(raised.value) and str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_units(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = asked(monkeypatch)
    assert len(everything) == 1 + 6 * 6 + (5 + 29) * 3 * 6 * 2
    assert len({unit.key for unit in everything}) == len(everything)
    kinds = [unit.key.split("/")[:2] for unit in everything]
    assert kinds[:16] == [["costs", "host"]] + [["layers", "alexnet"]] * 15
    assert kinds[16:18] == [["iterations", "alexnet"], ["iterations", "resnet18"]]
    assert kinds[18:105] == [["layers", "deepbench"]] * 87
    some = asked(monkeypatch, "--part", "layers", "--group", "alexnet", "--precision", "tf32", "--policy", "all")
    assert len(some) == 15
    problem = some[0].problem()
    assert problem.dtype == "float32" and problem.formats == ("contiguous",) * 3
    half = asked(monkeypatch, "--part", "layers", "--precision", "float16")[0].problem()
    assert half.dtype == "float16" and half.formats == ("channels_last",) * 3
    plain = asked(monkeypatch, "--part", "layers", "--precision", "float16-nchw")[0].problem()
    assert plain.dtype == "float16" and plain.formats == ("contiguous",) * 3


# Plans


def test_plans_within_limits() -> None:
    options = [
        Option(8, "stock", 0.1, 0),  # its scratch memory is unknown: no plan within a limit
        Option(8, "slow", 8.0, 0),
        Option(8, "fast", 3.0, 100),
        Option(2, "fast", 0.8, 25),
    ]
    plans = Plans.of(options, 8)
    named = {limit: [d and described(d)["division"] for d in plans.within(limit)] for limit in (0, 24, 25, 99, 100)}
    assert named == {
        0: ["slow(8)", "slow(8)"],
        24: ["slow(8)", "slow(8)"],
        25: ["slow(8)", "4xfast(2)"],
        99: ["slow(8)", "4xfast(2)"],
        100: ["fast(8)", "fast(8)"],
    }
    assert plans.needed() == {"undivided": 100, "divided": 100}
    quicker = [*options, Option(2, "fft", 0.76, 30)]
    assert Plans.of(quicker, 8).needed() == {"undivided": 100, "divided": 30}


def test_no_plan() -> None:
    plans = Plans.of([Option(8, "stock", 1.0, 0)], 8)
    assert plans.within(100) == (None, None)
    assert plans.needed() == {"undivided": None, "divided": None}


def test_runs_of_a_division() -> None:
    parts = [Option(4, "a", 1.0, 1), Option(4, "a", 1.0, 1), Option(1, "a", 1.0, 1), Option(1, "b", 1.0, 1)]
    assert described(Division(tuple(parts)))["division"] == "2xa(4) + a(1) + b(1)"


# Results


ABOUT = {"device": "a GPU", "torch": "2.13.0"}


def limits(*sizes: int) -> dict[str, Any]:
    """Of a row of a layer, what decides whether it is complete."""
    return {"limits": {str(size): {} for size in sizes}}


def test_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, *_ = asked(monkeypatch, "--part", "layers", "--group", "alexnet")
    (cost,) = asked(monkeypatch, "--part", "costs")

    def records() -> Records:
        return Records(tmp_path / "new" / "gpu.jsonl", "key")

    def measured(row: dict[str, Any], unit: Any) -> None:
        assert run([unit], 1, records(), ABOUT, 100.0, lambda _: row) == 1

    measured(limits(8 * MIB), one)
    assert is_done(records(), one, [8 * MIB], False)
    assert not is_done(records(), one, [8 * MIB, 64 * MIB], False)
    measured(limits(64 * MIB), one)
    assert is_done(records(), one, [8 * MIB, 64 * MIB], False)
    measured({"failed": "no memory"}, cost)
    assert is_done(records(), cost, [], False) and not is_done(records(), cost, [], True)


def test_another_device_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Records(tmp_path / "gpu.jsonl", "key").add({"key": "costs/host", "about": {"device": "a GPU"}})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--part", "costs", "--results", str(tmp_path)])
    assert main() == 2
    assert "device a GPU (now cpu)" in capsys.readouterr().err


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    Records(path, "key").add({"key": "one"})
    with path.open("a") as file:
        file.write('{"key": "tw')  # the process was killed here
    Records(path, "key").add({"key": "three"})
    assert list(Records(path, "key").found) == ["one", "three"]


def test_a_run_ends_in_time_and_measures_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def measure(unit: LayerUnit) -> dict[str, Any]:
        nonlocal now
        now += 100.0
        return {"unit": {}}

    monkeypatch.setattr("time.perf_counter", lambda: now)
    pending = asked(monkeypatch, "--part", "layers", "--group", "alexnet", "--precision", "float32")
    for seconds, count in ((420.0, 4), (10.0, 1), (100.0, 1), (200.0, 2)):
        results = Records(tmp_path / f"{seconds}.jsonl", "key")
        assert run(pending, len(pending), results, ABOUT, seconds, measure) == count
        assert list(results.found) == [unit.key for unit in pending[:count]]


def test_a_unit_that_takes_too_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(unit: LayerUnit) -> dict[str, Any]:
        if unit is pending[1]:
            time.sleep(60)
        return {"unit": {}}

    pending = asked(monkeypatch, "--part", "layers", "--group", "alexnet")
    results = Records(tmp_path / "gpu.jsonl", "key")
    assert run(pending, len(pending), results, ABOUT, 1.0, measure) == 1
    assert list(results.found) == [pending[0].key]


def test_a_lost_device_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(unit: LayerUnit) -> dict[str, Any]:
        raise DeviceLost("an illegal memory access")

    pending = asked(monkeypatch, "--part", "layers", "--group", "alexnet")
    path = tmp_path / "gpu.jsonl"
    with pytest.raises(DeviceLost):
        run(pending, len(pending), Records(path, "key"), ABOUT, 10.0, measure)
    record = {"key": pending[0].key, "about": ABOUT, "failed": "an illegal memory access"}
    assert Records(path, "key").found == {pending[0].key: record}


# The command


def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path)])
    assert main() == 2
    assert capsys.readouterr().err.splitlines() == [
        "gpu.py: torch finds no CUDA device, cuda:0 is to be measured on (--device cpu tries the script itself)"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, said",
    [
        (("--group", "lenet"), "invalid choice: 'lenet'"),
        (("--limits", "8,much"), "'8,much': accepted are whole numbers of MiB"),
        (("--device", "abacus"), "'abacus': accepted are cuda"),
        (("--layers", "absent.csv"), "gpu.py: absent.csv: No such file"),
    ],
    ids=["group", "limits", "device", "layers"],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_limits_are_mebibytes() -> None:
    assert mebibytes("64,0,8") == [0, 8 * MIB, 64 * MIB]


def test_a_layer_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, folder = tmp_path / "tiny.csv", tmp_path / "results"
    table.write_text(TINY)
    options = ["--device", "cpu", "--part", "layers", "--layers", str(table), "--precision", "float32"]
    options += ["--direction", "backward_filter", "--results", str(folder), "--policy", "powerOfTwo", "--limits", "1"]
    done = run_python("benchmarks/gpu/gpu.py", *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 units are measured" in done.stderr
    (row,) = Records(folder / "gpu.jsonl", "key").found.values()
    entry = row["limits"][str(MIB)]
    assert (
        entry["capped"] > 0
        and entry["over"].keys() == {"undivided", "stock", "capped"}
        and row["stock"] > 0
        and row["patched"]["over_stock"] > 0
    )
    for kind in ("undivided", "divided"):
        plan = entry[kind]
        assert plan is None or (plan["error"] < 1e-5 and plan["seconds"] > 0 and plan["workspace"] <= MIB)
    assert (folder / "gpu-times.sqlite").exists() and "tiny 4x2x16x16" in (folder / "gpu.md").read_text()
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options, "--tables"])
    assert main() == 0
    assert "speed of the divided plan" in capsys.readouterr().out
