"""Files that describe machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_machine import TEXT

from distconv.model.choosing import Question
from distconv.performance import automatic
from distconv.performance import machine as machines
from distconv.performance.doubt import doubt, standard_error
from distconv.performance.kept import Kept
from distconv.performance.machine import MachineError, machine_toml, parse, read_machine


@pytest.mark.parametrize("name", machines.built_in())
def test_machines_that_ship_can_be_read(name: str) -> None:
    assert read_machine(name).device.memory >= 2**30


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("flops = 1e12", "", "device.flops is missing"),
        ("efficiency = 0.5", "efficiency = 1.5", "device.efficiency = 1.5"),
        ("asynchronous = true", "asynchronous = true\ncarries = 1.5", "accepted: a number from 0 to 1"),
        ("asynchronous = true", "asynchronous = false\nslows = 0.5", "host.slows = 0.5; accepted: a number from 1 on"),
        ("ranks = 2", "ranks = 2.5", "node.ranks = 2.5; accepted: a whole number"),
        ("asynchronous = true", "asynchronous = 1", "accepted: true or false"),
        ("bandwidth = 1e9", 'bandwidth = 1e9\ntrees = "yes"', "network.trees = 'yes'; accepted: true or false"),
        ('"16GiB"', '"much"', "device.memory"),
        ("[host]", "[hosts]", "unknown field hosts"),
        ("bandwidth = 1e9", "bandwidth = 1e9\nspeed = 3", "unknown field network.speed"),
        ("flops = 1e12", "flops = ", "Invalid value"),
        ('name = "two nodes of two"', "", "name is missing"),
        ("[device]", "doubt = true\n[device]", "doubt = True; accepted: a text"),
    ],
)
def test_a_machine_file_with_a_mistake_is_one_line(old: str, new: str, complaint: str) -> None:
    with pytest.raises(MachineError) as refused:
        parse(TEXT.replace(old, new, 1))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_that_is_not_there_is_one_line() -> None:
    with pytest.raises(MachineError, match="no such file; accepted: a TOML file, here, or h100, lassen"):
        read_machine("nowhere.toml")


def test_times_that_spread_and_processors_that_others_use_make_a_machine_doubtful() -> None:
    """Of seven times whose quartiles are 0.27 of the median apart, the error is 0.25 / sqrt(7); of equal ones, none."""
    spread = [0.7, 0.8, 0.93, 1.0, 1.07, 1.2, 9.0]
    assert standard_error(spread) == pytest.approx(1.25 / 1.35 * 0.27 / 7**0.5)
    assert standard_error([2.0] * 7) == 0.0
    assert doubt([0.0, 0.1, 0.9], [0.9, 1.0]) == ""
    assert doubt([0.0, 0.4, 0.9], [1.0]).endswith(": figures are uncertain by 40%")
    assert doubt([0.1], [0.5, 0.6]).endswith(": ranks got 55% of their processor time")
    assert doubt([0.2], [0.5]).endswith("by 20%, and ranks got 50% of their processor time")


def test_a_doubtful_machine_says_so_wherever_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "cache_folder", lambda: tmp_path)
    doubtful = replace(parse(TEXT), doubt=doubt([0.4], [1.0]))
    for machine, lines in (parse(TEXT), 0), (doubtful, 1):
        machines.here().write_text(machine_toml(machine))
        assert parse(machine_toml(machine)).doubt == machine.doubt
        automatic.machine_for(Question("model", "", 2, 2, 1), Kept())
        told = capsys.readouterr().err
        assert told.count("\n") == lines and told.count(f"machine.toml was {doubtful.doubt}; run ") == lines
