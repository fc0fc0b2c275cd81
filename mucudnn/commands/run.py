"""`python -m mucudnn run`: runs a script or a module with its convolutions divided."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import mucudnn
from mucudnn import program
from mucudnn.commands.arguments import OPTIONS, Commands, add_settings, check_writable, flags, settings, usage
from mucudnn.commands.output import add_wide, show
from mucudnn.reporting.record import Outcome, gained
from mucudnn.reporting.tables import summary, table


def add(commands: Commands) -> None:
    """Adds the command."""
    running = commands.add(
        "run",
        _run,
        "run a script or a module with its convolutions divided",
        "Runs a script as plain python does, its convolutions divided where that is faster within the\n"
        "workspace limit. What the first run finds out is kept in a database, with which later runs begin.",
        "train.py --epochs 3",
        "--workspace-limit 256MiB --report plans.json train.py --epochs 3",
        "--policy all -m package.train --epochs 3",
    )
    running.usage = "python -m mucudnn run [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    add_settings(running)
    running.add_argument("--report", metavar="FILE", help="write what was chosen to FILE, as JSON, at the end")
    running.add_argument("--verbose", action="store_true", help="print what was chosen to stderr at the end")
    add_wide(running)
    running.add_argument(
        "--summary",
        action=argparse.BooleanOptionalAction,
        help="print at the end, on stderr, what the run has saved, in two or three lines (default: on a terminal)",
    )


def separated(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of `run` that are its own, and those from SCRIPT or -mMODULE on, which may look like options too."""
    if words[:1] != ["run"]:
        return words, []
    with_value = {flag for name in OPTIONS for flag in flags(name)} | {"--report"}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "--" and not words[at].startswith("-m"):
        at += 2 if words[at] in with_value else 1
    own, program = words[:at], words[at:]
    if program[:1] == ["--"]:
        program = program[1:]
    if program[:1] == ["-m"]:
        program = ["".join(program[:2]), *program[2:]] if len(program) > 1 else []
    return own, program


def _run(arguments: Any) -> int:
    with usage(arguments.parser):
        if not arguments.program:
            arguments.parser.error("give a SCRIPT or -m MODULE; see --help")
        chosen = settings(arguments)
        if arguments.report is not None:
            check_writable("--report", arguments.report)
        name, *rest = arguments.program
        wanted = program.module(name.removeprefix("-m")) if name.startswith("-m") else program.script(name)
    overrides = {setting: getattr(chosen, setting) for setting in OPTIONS}
    process = os.getpid()
    with mucudnn.patched(**overrides) as session:
        try:
            wanted.run(rest)
        finally:
            # A child that the script forked ends here too.
            if os.getpid() == process:
                _report(arguments, session.outcome())
    return 0


def _report(arguments: Any, outcome: Outcome) -> None:
    """Writes and prints what the user asked for, whatever became of the script."""
    if arguments.report is not None:
        try:
            outcome.write(arguments.report)
        except OSError as error:
            print(f"{arguments.parser.prog}: --report {arguments.report}: {error.strerror}", file=sys.stderr)
    if arguments.verbose:
        tables = [table(outcome.records, wide=arguments.wide)] if outcome.records else []
        sentences = summary(outcome.records, called=outcome.called), *outcome.notices
        show(sys.stderr, *tables, *sentences, wide=arguments.wide)
    if arguments.summary or (arguments.summary is None and sys.stderr.isatty()):
        for sentence in gained(outcome, arguments.report):
            print(f"mucudnn: {sentence}", file=sys.stderr)
