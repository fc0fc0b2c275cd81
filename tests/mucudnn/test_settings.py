"""Settings: what is accepted, what wins over what, and the one line for everything else."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.patching import log_to_stderr
from mucudnn.settings import SETTINGS, Given, Setting, SettingError, Settings
from mucudnn.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1GB", 10**9),
        ("1.5GiB", 3 << 29),
        (".5KB", 500),
        ("2TiB", 2 << 40),
        ("7B", 7),
        (" 67108864 ", 64 << 20),
        ("0", 0),
        (0, 0),
        (67108864, 64 << 20),
        (64e6, 64 * 10**6),
        ("unlimited", math.inf),
        ("Unlimited", math.inf),
        (math.inf, math.inf),
    ],
)
def test_sizes(given: object, expected: float) -> None:
    assert parse_bytes(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        "64M",
        "MiB",
        "-1",
        "1e6",
        "64MiBB",
        "1 000",
        "inf",
        "nan",
        "½MiB",
        "1.2.3",
        "9" * 400,
        -1,
        0.5,
        math.nan,
        True,
        b"64",
    ],
)
def test_sizes_that_are_none(given: object) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({}, workspace_limit=given)
    message = str(caught.value)
    assert message.startswith(f"workspace_limit={given!r}: ")
    assert "64MiB" in message and "unlimited" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        (5000 << 40, "5000 TiB"),
        (math.inf, "unlimited"),
    ],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 50))
def test_sizes_for_people_read_back_within_their_rounding(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)


def test_defaults() -> None:
    settings = Settings.from_environment({})
    assert (settings.workspace_limit, settings.policy, settings.progress, settings.log) == (
        64 << 20,
        "powerOfTwo",
        "auto",
        None,
    )
    assert settings.database.endswith("times.sqlite") and Path(settings.database).is_absolute()
    assert set(settings.sources) == set(SETTINGS) and set(settings.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("total", "limit", "both"),
    [(None, None, (64 << 20, None)), (100, None, (100, 100)), (100, 60, (60, 100)), (100, 200, (100, 100))],
)
def test_a_total_bounds_the_limit(total: int | None, limit: int | None, both: tuple[float, float | None]) -> None:
    settings = Settings.from_environment({}, total_workspace_size=total, workspace_limit=limit)
    assert (settings.workspace_limit, settings.total_workspace_size) == both
    again = {name: getattr(settings, name) for name in ("workspace_limit", "total_workspace_size")}
    assert Settings.from_environment({}, **again) == settings


@pytest.mark.parametrize(
    ("name", "variable", "text", "value"),
    [
        ("workspace_limit", "MUCUDNN_WORKSPACE_LIMIT", "1GB", 1e9),
        ("total_workspace_size", "MUCUDNN_TOTAL_WORKSPACE_SIZE", "1GB", 1e9),
        ("policy", "MUCUDNN_BATCH_SIZE_POLICY", "all", "all"),
        ("policy", "MUCUDNN_BATCH_SIZE_POLICY", "poweroftwo", "powerOfTwo"),
        ("database", "MUCUDNN_DATABASE", ":memory:", ":memory:"),
        ("database", "MUCUDNN_DATABASE", "times.db", "times.db"),
        ("engines", "MUCUDNN_ENGINES", "All", "all"),
        ("check", "MUCUDNN_CHECK", "Off", False),
        ("progress", "MUCUDNN_PROGRESS", "0", "off"),
        ("progress", "MUCUDNN_PROGRESS", "On", "on"),
        ("log", "MUCUDNN_LOG", "INFO", "info"),
    ],
)
def test_the_environment_sets_and_an_argument_wins(name: str, variable: str, text: str, value: object) -> None:
    settings = Settings.from_environment({variable: text})
    assert (getattr(settings, name), settings.sources[name]) == (value, variable)
    settings = Settings.from_environment({variable: "?:\0"}, **{name: text})
    assert (getattr(settings, name), settings.sources[name]) == (value, "argument")


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("MUCUDNN_WORKSPACE_LIMIT", "lots", "64MiB"),
        ("MUCUDNN_BATCH_SIZE_POLICY", "powersOfTwo", "undivided, powerOfTwo, all"),
        ("MUCUDNN_DATABASE", "/", "path of a file"),
        ("MUCUDNN_TOTAL_WORKSPACE_SIZE", "-1", "512MiB"),
        ("MUCUDNN_MEMORY_LIMIT", "peak", "10GiB"),
        ("MUCUDNN_ENGINES", "some", "heuristic or all"),
        ("MUCUDNN_CHECK", "auto", "on or off"),
        ("MUCUDNN_PROGRESS", "maybe", "auto, on or off"),
        ("MUCUDNN_LOG", "loud", "debug, info"),
    ],
)
def test_a_wrong_variable_is_one_line_that_says_what_is_accepted(variable: str, text: str, accepted: str) -> None:
    with pytest.raises(ValueError, match="accepted is") as caught:
        Settings.from_environment({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r}: ")
    assert accepted in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_variable_is_unset() -> None:
    assert Settings.from_environment(
        dict.fromkeys((s.variable for s in SETTINGS.values()), "")
    ) == Settings.from_environment({})


def test_arguments_of_program_types() -> None:
    settings = Settings.from_environment({}, database=Path("~/times"), progress=False, workspace_limit=None)
    assert settings.database == str(Path.home() / "times")
    assert settings.progress == "off"
    assert settings.sources["workspace_limit"] == "default"


def test_every_setting_can_be_given() -> None:
    assert Given.__optional_keys__ == SETTINGS.keys()


def test_a_text_is_parsed_once_for_each_change() -> None:
    parsed: list[object] = []

    def parse(given: object) -> int:
        parsed.append(given)
        return int(str(given))

    setting = Setting("VARIABLE", lambda: "7", "a number", "of a test", parse)
    for text in ("1", "1", "2", "2", "", "", "1"):
        assert setting.sourced({"VARIABLE": text}) == ((int(text), "VARIABLE") if text else (7, "default"))
    assert parsed == ["1", "2", "7", "1"]
    for _ in range(2):
        with pytest.raises(SettingError, match="VARIABLE='one'"):
            setting.sourced({"VARIABLE": "one"})


def test_an_unknown_override() -> None:
    with pytest.raises(TypeError, match="workspace_limit"):
        Settings.from_environment({}, limit=3)


def test_the_log_goes_to_stderr_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("mucudnn")
    log_to_stderr("info")
    log_to_stderr("info")
    logger.info("measured")
    logger.debug("unseen")
    log_to_stderr(None)
    logger.info("unheard")
    assert capsys.readouterr().err == "mucudnn INFO: measured\n"
    assert (logger.level, logger.propagate) == (logging.NOTSET, True)


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('mucudnn'); package.__path__ = ['mucudnn'];"
        "sys.modules['mucudnn'] = package; import mucudnn.settings; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
