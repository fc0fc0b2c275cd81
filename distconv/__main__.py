"""The command line: python -m distconv COMMAND."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any, NoReturn

from distconv import private_names, settings
from distconv.commands import calibrate, check, doctor, plan, run
from distconv.job.launcher import BadInput
from distconv.place import find_place
from mucudnn.commands.arguments import unknown_before_command, unrecognized
from mucudnn.program import NotFound
from mucudnn.version import VERSION

COMMANDS = (run, check, plan, calibrate, doctor)


class _Parser(argparse.ArgumentParser):
    """A parser of the program's options or of a command's, whose texts keep their lines."""

    def __init__(self, *, formatter_class: Any = argparse.RawDescriptionHelpFormatter, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        before = unknown_before_command(self, args)
        found, unknown = (namespace, before) if before else super().parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(self, unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m distconv",
        description="Runs single-device PyTorch scripts on many ranks, each of which has a part of every activation.",
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distconv {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.BRIEF, description=module.DESCRIPTION, epilog=module.EPILOG)
        module.add_options(command)
        command.set_defaults(command=module.command)
    return parser


def _parsed(first: bool) -> argparse.Namespace:
    """The options; help is printed by the first rank alone."""
    if first:
        return _parser().parse_args()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        return _parser().parse_args()


def main() -> int:
    """Runs one command.

    Returns:
        The exit code: what the command says, or 2 for bad input, which the first rank reports in one line.
    """
    place = find_place(os.environ)
    first = place is None or place.rank == 0
    if first:
        settings.report_unknown_variables()
    try:
        options = _parsed(first)
        if options.command is not run.command:  # whose launcher needs no torch; its ranks ask for themselves
            private_names.check()
        code: int = options.command(options)
    except (BadInput, NotFound, settings.SettingError, private_names.MissingName) as error:
        if first:
            print(f"distconv: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
