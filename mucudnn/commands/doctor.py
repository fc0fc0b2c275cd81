"""`python -m mucudnn doctor`: shows what this machine offers, and whether it works."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mucudnn.commands import findings
from mucudnn.commands.arguments import Commands, add_json, add_settings, settings, usage
from mucudnn.commands.output import print_json, show
from mucudnn.sizes import format_bytes
from mucudnn.timing.store import Store

if TYPE_CHECKING:
    from rich.table import Table


_WORDS = {None: "-", True: "on", False: "off"}


def add(commands: Commands) -> None:
    """Adds the command."""
    examining = commands.add(
        "doctor",
        _doctor,
        "show what is found on this machine, and whether it works",
        "Shows versions, devices, algorithms, the database and the settings with their sources, and tries a\n"
        "convolution. The exit code is 0 if that works, else 1.",
        "",
        "--json",
    )
    add_settings(examining)
    add_json(examining)


def _doctor(arguments: Any) -> int:
    with usage(arguments.parser):
        chosen = settings(arguments)
    found = findings.examine(chosen, Store(chosen.database))
    if arguments.json:
        print_json(found)
    else:
        show(sys.stdout, *_doctor_tables(found))
    return 0 if found["shim"] == "works" else 1


def _cudnn_lines(found: dict[str, Any]) -> list[str]:
    lines = [found["state"]]
    if "library" in found:
        lines.append(f"{found['version']}, {found['library']}")
    for gpu in found.get("gpus", ()):
        lines.append(f"{gpu['gpu']}: {', '.join(gpu['algorithms']) or 'no algorithms'}")
        lines += [f"  refused {name}: {reason}" for name, reason in gpu["refused"].items()]
    return lines


def _doctor_tables(found: dict[str, Any]) -> list[Table]:
    from rich.table import Table

    machine = Table("found", "", show_header=False)
    for name, version in found["versions"].items():
        machine.add_row(name, "none" if version is None else str(version), end_section=name == "cuDNN")
    database = found["database"]
    for name, value in (
        ("devices", "\n".join(found["devices"])),
        ("threads", str(found["threads"])),
        ("precision", found["precision"]),
        ("algorithms", ", ".join(found["algorithms"])),
        ("cuDNN", "\n".join(_cudnn_lines(found["cudnn"]))),
        ("outside torch's\nallocator", "\n".join(f"{gpu}: {format_bytes(n)}" for gpu, n in found["outside"].items())),
        ("database", f"{database['path']}{'' if database['kept'] else ' (not kept: in memory)'}"),
        ("", f"{database['launches']} launches of {database['convolutions']} convolutions"),
        ("wrong results", "\n".join(found["wrong"]) or "none known"),
        ("shim", found["shim"]),
    ):
        machine.add_row(name, value)
    shown = Table("setting", "value", "from", "variable")
    for name, setting in found["settings"].items():
        value = setting["value"]
        text = format_bytes(value) if isinstance(value, float) else _WORDS.get(value, str(value))
        shown.add_row(name, text, setting["from"], setting["variable"])
    return [machine, shown]
