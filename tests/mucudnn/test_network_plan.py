"""Plans by times on record: against the optimizer's own answers, and what the command says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mucudnn.__main__ import main
from mucudnn.commands.plan import missing
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.networks.layers import LayerCall
from mucudnn.networks.plan import plan
from mucudnn.optimizer import Option, best_division
from mucudnn.planning import search
from mucudnn.planning.on_record import RecordedTimes, times
from mucudnn.settings import Settings
from mucudnn.timing.logbook import Environment
from mucudnn.timing.store import Store

MIB = 2**20
HERE = Environment("cpu a", 2, False, "fp32", "torch")
NETWORK = f"{Path(__file__).with_name('scripts') / 'network.py'}:small"


def problem(extent: int, kernel: int = 5) -> ConvProblem:
    return ConvProblem.of_convolution(
        Direction.FORWARD, (extent, 2, 16, 16), (3, 2, kernel, kernel), stride=(1, 1), padding=(2, 2), dilation=(1, 1)
    )


def rows(extent: int, stock: float = 1.0) -> list[Option]:
    """Torch's own kernel, and an algorithm that takes a tenth of its time and 1 MiB per sample."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= extent]
    return [
        Option(extent, "stock", stock, 0),
        *(Option(size, "fft", stock * (0.1 * size / extent + 0.02), size * MIB) for size in sizes),
    ]


def known(*entries: tuple[ConvProblem, list[Option]], environment: Environment = HERE) -> RecordedTimes:
    contents = [(json.loads(json.dumps({**p.launch_key(), **environment.launch_key()})), rows) for p, rows in entries]
    (found,) = times(contents)
    return found


def settings(**given: Any) -> Settings:
    return Settings.from_environment({}, **given)


@pytest.mark.parametrize("policy", ["undivided", "powerOfTwo"])
@pytest.mark.parametrize("limit", [0, MIB, 3 * MIB, 8 * MIB, math.inf])
def test_within_a_limit_it_is_the_best_division(limit: float, policy: str) -> None:
    layer, options = LayerCall("a", problem(16), 1), rows(16)
    found = plan([layer], known((layer.problem, options)), settings(workspace_limit=limit, policy=policy))
    (row,) = found.rows
    usable = [o for o in options if policy == "powerOfTwo" or o.extent == 16]
    best = best_division(usable, 16, limit)
    assert best is not None
    assert row.choice.options == best.options
    assert row.record.limit == limit and row.record.workspace == found.workspace == best.workspace
    assert row.record.stock_seconds == 1.0


def test_a_total_is_divided_among_all_kernels() -> None:
    layers = [LayerCall("a", problem(16), 3), LayerCall("b", problem(16, 3), 1)]
    times_ = known((layers[0].problem, rows(16)), (layers[1].problem, rows(16, stock=9.0)))
    found = plan(layers, times_, settings(total_workspace_size=16 * MIB))
    assert sum(row.count for row in found.rows) == 4
    assert found.workspace == sum(row.count * row.choice.workspace for row in found.rows) <= 16 * MIB
    by_name = {row.layer.name: row.choice.workspace for row in found.rows}
    assert by_name["b"] > by_name["a"]  # where it saves most
    equal = plan(layers, times_, settings(workspace_limit=4 * MIB))
    assert found.seconds <= equal.seconds
    assert found.sharing is not None and found.sharing.gap == 0


def test_a_division_counts_for_what_it_took_as_a_whole() -> None:
    layer, options = LayerCall("a", problem(16), 1), rows(16)
    slow = [*options, Option(16, "division 8:fft+8:fft", 0.9, 8 * MIB)]
    (row,) = plan([layer], known((layer.problem, slow)), settings(workspace_limit=8 * MIB)).rows
    assert [option.extent for option in row.choice.options] == [4, 4, 4, 4]
    hopeless = [Option(16, "stock", 1.0, 0), Option(8, "fft", 0.1, 0), Option(16, "division 8:fft+8:fft", 0.96, 0)]
    (row,) = plan([layer], known((layer.problem, hopeless)), settings()).rows
    assert row.record.division == "stock(16)"  # hardly faster than torch's own kernel


def test_other_machines_do_not_mix() -> None:
    other = Environment("gpu", 2, False, "fp32", "torch")
    p = problem(16)
    contents = [({**p.launch_key(), **e.launch_key()}, rows(16, s)) for e, s in ((HERE, 1.0), (other, 0.01))]
    found = times(contents)
    assert [plan([LayerCall("a", p, 1)], entry, settings()).stock_seconds for entry in found] == [1.0, 0.01]
    assert "device gpu" in found[1].name


def test_what_is_said() -> None:
    layers = [LayerCall("a", problem(16), 3), LayerCall("b", problem(16, 3), 1), LayerCall("c", problem(16, 4), 2)]
    nothing = [Option(16, "stock", 0.5, 0), Option(16, "fft", 0.7, MIB)]
    times_ = known((layers[0].problem, rows(16)), (layers[1].problem, nothing))
    found = plan(layers, times_, settings(workspace_limit=4 * MIB))
    gain, used, limit = found.sentences()
    assert "1040.000 ms predicted, 3.37x" in gain and "(3500.000 ms)" in gain and "48% of the time" in gain
    assert "4 MiB at most, undivided up to 16 MiB" in gain and used == "Workspace: 4 MiB at most, reused by all."
    assert "most would be gained in a, forward, with 16 MiB" in limit
    (sentence,) = missing(found)
    assert "1 of 3 convolutions" in sentence and "c (16x2x16x16 k3x2x4x4 p2)" in sentence
    free = plan(layers[:2], times_, settings(workspace_limit="unlimited"))
    assert len(free.sentences()) == 2
    assert missing(free) == []


def test_the_command_plans_from_another_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mucudnn.networks import layers

    path = str(tmp_path / "times.sqlite")
    store = Store(path)
    for layer in layers.convolutional(layers.find(NETWORK).build, (16, 3, 21, 21)):
        store.record({**layer.problem.launch_key(), **HERE.launch_key()}, rows(16))
    store.close()
    arguments = ["plan", NETWORK, "--input", "3,21,21", "--batch", "16", "--database", path]
    assert main([*arguments, "--limit", "4MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == HERE.launch_key() and found["missing"] == []
    assert all(entry["workspace"] == 4 * MIB for entry in found["plans"])
    assert main([*arguments, "--total", "20MiB"]) == 0
    out = capsys.readouterr().out
    assert "cpu a" in out and "of 20 MiB" in out and "2.same" in out
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--machine", "H100"])
    assert ended.value.code == 2
    assert "has no times of --machine H100: there are device cpu a" in capsys.readouterr().err


@pytest.mark.parametrize("planning", ["ahead", "live"])
@pytest.mark.parametrize("is_short", [True, False])
def test_the_command_tells_what_is_missing_and_measures_it(
    is_short: bool,
    planning: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUCUDNN_PLANNING", planning)
    monkeypatch.setattr(search, "is_too_short", lambda seconds: is_short)
    arguments = ["plan", NETWORK, "--input", "3,21,21", "--batch", "2", "--database", str(tmp_path / "times.sqlite")]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "has no times: `python -m mucudnn bench`" in capsys.readouterr().err
    assert main([*arguments, "--measure", "--progress", "off"]) == 0
    assert "Left out" not in capsys.readouterr().out
    assert main([word for word in arguments if word not in ("--batch", "2")]) == 0
    printed = capsys.readouterr()
    assert "2x3x21x21" in printed.out
    assert printed.err == "python -m mucudnn plan: the batch size on record is 2; --batch sets it\n"
    arguments[arguments.index("2")] = "4"
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "Left out: 10 of 10 convolutions" in out
