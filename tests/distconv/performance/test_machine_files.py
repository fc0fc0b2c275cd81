"""Files that describe machines."""

from __future__ import annotations

import pytest
from small_machine import TEXT

from distconv.performance import machine as machines
from distconv.performance.machine import MachineError, parse, read_machine


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
    ],
)
def test_a_machine_file_with_a_mistake_is_one_line(old: str, new: str, complaint: str) -> None:
    with pytest.raises(MachineError) as refused:
        parse(TEXT.replace(old, new, 1))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_that_is_not_there_is_one_line() -> None:
    with pytest.raises(MachineError, match="no such file; accepted: a TOML file, here, or h100, lassen"):
        read_machine("nowhere.toml")
