"""What a user chooses for a job: an argument wins over an option, that over the environment, that over the default."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch.distributed as dist

import distconv
from distconv import settings
from distconv.settings.partition import Partition
from distconv.tensors.mesh import channel_algorithm

PACKAGE = Path(distconv.__file__).parent


def test_who_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCONV_CHANNEL_ALGORITHM", raising=False)
    assert settings.value("channel_algorithm") == "auto"
    monkeypatch.setenv("DISTCONV_CHANNEL_ALGORITHM", "y")
    assert settings.value("channel_algorithm") == "y"
    with settings.options({"channel_algorithm": "x", "backend": None}):
        assert settings.value("channel_algorithm") == "x"
        assert settings.value("channel_algorithm", "w") == "w"
    assert settings.value("channel_algorithm") == "y"


def test_values_and_what_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCONV_PARTITION", raising=False)
    assert settings.value("partition") is None
    monkeypatch.setenv("DISTCONV_PARTITION", "")
    assert settings.value("partition") is None
    monkeypatch.setenv("DISTCONV_PARTITION", "sample=2")
    assert settings.value("partition") == Partition.parse("sample=2")


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("partition", "hight=2", r"axes sample, channel, filter, depth, height, width \(1-D data has width\)"),
        ("backend", "smoke", "accepted is gloo, nccl, mpi"),
        ("channel_algorithm", "z", "accepted is x, y, w, auto"),
        ("random", "other", "accepted is same, apart"),
        ("halo", "chain=", "accepted is layer, chain, chain=ROWS"),
    ],
)
def test_bad_values_are_one_line_that_names_their_source(
    name: str, text: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = settings.SETTINGS[name].variable
    monkeypatch.setenv(variable, text)
    with pytest.raises(settings.SettingError, match=f"^{variable}[:=].*{text}.*{accepted}$"):
        settings.value(name)
    with pytest.raises(settings.SettingError, match=f"^--{name.replace('_', '-')}[:=].*{text}.*{accepted}$"):
        settings.options({name: text}).__enter__()


def test_a_script_that_calls_init_keeps_the_algorithm_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCONV_CHANNEL_ALGORITHM", "x")
    try:
        with settings.options({"channel_algorithm": "y", "partition": "channel=1"}):
            mesh = distconv.init(device_type="cpu")
            assert mesh.mesh_dim_names == ("channel",)
            assert channel_algorithm(mesh) == "y"
            assert channel_algorithm(distconv.init("channel=1", device_type="cpu", channel_algorithm="x")) == "x"
    finally:
        dist.destroy_process_group()


def test_the_environment_is_read_for_settings_in_one_place() -> None:
    """Other files name a variable in their texts for people only: nowhere is one a string of its own."""
    variables = {setting.variable for setting in settings.SETTINGS.values()}
    for path in PACKAGE.rglob("*.py"):
        if path != Path(settings.__file__):
            constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not variables & constants, path
