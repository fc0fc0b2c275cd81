"""The command line: `python -m mucudnn run | bench | report | doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import mucudnn
from mucudnn.commands import bench, doctor, report, run
from mucudnn.commands.arguments import Commands, Parser, examples
from mucudnn.private_names import MissingName, check_names
from mucudnn.settings import SETTINGS, VARIABLES
from mucudnn.spelling import report_unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, or what the command says; 2 where torch lacks what mucudnn needs.
    """
    try:
        check_names()
    except MissingName as error:
        print(f"mucudnn: {error}", file=sys.stderr)
        return 2
    own, program = run.separated(list(sys.argv[1:] if arguments is None else arguments))
    parsed = _parser().parse_args(own)
    parsed.program = program
    report_unknown("MUCUDNN", VARIABLES)
    code: int = parsed.command(parsed)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="python -m mucudnn",
        description="Makes the convolutions of an unmodified PyTorch program faster within a workspace limit.",
        epilog=examples(
            "python -m mucudnn run train.py --epochs 3",
            "python -m mucudnn bench torchvision.models:resnet18 --input 3,224,224 --workspace-limit 64MiB",
            "python -m mucudnn doctor",
        )
        + "\n\n"
        + _variables(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mucudnn {mucudnn.__version__}")
    commands = Commands(parser)
    for command in (run, bench, report, doctor):
        command.add(commands)
    return parser


def _variables() -> str:
    width = max(len(setting.variable) for setting in SETTINGS.values())
    lines = [f"  {setting.variable:<{width}}  {setting.meaning}" for setting in SETTINGS.values()]
    return "environment variables; an option of a command wins over its variable:\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
