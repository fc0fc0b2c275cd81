"""The options that several commands share, with a one-line error for every mistake."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mucudnn.program import NotFound
from mucudnn.settings import SETTINGS, SettingError, Settings
from mucudnn.spelling import meant

OPTIONS = [name for name, setting in SETTINGS.items() if setting.metavar]
"""The settings that are options of the commands."""

_SHORT = {"workspace_limit": "--limit", "total_workspace_size": "--total"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        before = unknown_before_command(self, args)
        found, unknown = (namespace, before) if before else super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"{unrecognized(self, unknown)}; see {self.prog} --help")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def unrecognized(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    """The message about words that a parser does not know; it suggests an option for the first one."""
    options = re.findall(r"--[\w-]+", parser.format_help())
    return f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0].partition('=')[0], options)}"


def unknown_before_command(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> list[str]:
    """The option before the command that a parser of commands does not know. Else argparse gives the command what
    follows, which that refuses first.

    ``words``: what is parsed; the program's own arguments if not given.
    """
    first = list(sys.argv[1:] if words is None else words)[:1]
    known = re.findall(r"--?[\w-]+", parser.format_usage().replace(parser.prog, ""))
    is_of_a_command = parser.get_default("command") is not None
    return [] if is_of_a_command or not first or first[0] in ("--", "--help", *known) or first[0][:1] != "-" else first


class Commands:
    """The commands of `python -m mucudnn`."""

    def __init__(self, parser: Parser) -> None:
        self._parsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def add(self, name: str, action: Callable[[Any], int], brief: str, text: str, *found: str) -> Parser:
        """A command; `action` gets the parsed arguments and gives the exit code."""
        added = self._parsers.add_parser(
            name,
            help=brief,
            description=text,
            epilog=examples(*(f"python -m mucudnn {name} {example}".rstrip() for example in found)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(command=action, parser=added)
        return added


def flags(name: str) -> list[str]:
    """The option strings of a setting."""
    return [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]


def add_settings(parser: Parser, *names: str) -> None:
    """Options for settings; all of them if none is named."""
    for name in names or OPTIONS:
        setting = SETTINGS[name]
        default = setting.default()
        default_of = f"{setting.variable}{f', else {default}' if default is not None else ''}"
        parser.add_argument(
            *flags(name),
            type=_checked(name),
            metavar=setting.metavar,
            help=f"{setting.meaning}. Accepted: {setting.accepted} (default: {default_of})".replace("%", "%%"),
        )


def add_json(parser: Parser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def settings(arguments: Any) -> Settings:
    """The settings from the options, the environment and the defaults."""
    given = {name: getattr(arguments, name, None) for name in OPTIONS}
    return Settings.from_environment(**given)


@contextmanager
def usage(parser: Parser) -> Iterator[None]:
    """Ends the program with one line and exit code 2 where what the user gave is wrong."""
    try:
        yield
    except (NotFound, SettingError) as error:
        parser.error(str(error))


def check_writable(option: str, path: str) -> None:
    """Refuses a file that cannot be written before the work begins, and not after hours of it.

    Raises:
        NotFound: naming the option and what is accepted.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise NotFound(f"cannot write {option} {path}: accepted is the path of a file in an existing, writable folder")


def examples(*lines: str) -> str:
    """Command lines for the end of a help text."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def _checked(name: str) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return SETTINGS[name].parse(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r}: accepted is {SETTINGS[name].accepted}") from None

    return value


NAMES = (
    "NETWORK is module:attribute or file.py:attribute, the attribute a torch.nn.Module or something that\n"
    "makes one, such as torchvision.models:resnet18; or a name that mucudnn knows, such as resnet18."
)
"""The values of NETWORK, for a help text."""

INPUT = "the shape of one sample, or, samples first, of the whole input: whichever the network takes"
"""The values of `--input`, for a help text."""

USUAL = 32  # Samples, where nothing says how many.


def add_network(parser: Parser) -> None:
    """NETWORK with its `--input` and `--batch`."""
    parser.add_argument("network", metavar="NETWORK", help="the network")
    parser.add_argument("--input", type=parse_shape, metavar="C,H,W", help=f"{INPUT} (default: as the name says)")
    add_batch(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """`--batch`."""
    parser.add_argument(
        "--batch", type=_count, metavar="N", help=f"samples (default: as --input or the name says, or {USUAL})"
    )


def parse_shape(text: str, least: int = 2) -> tuple[int, ...]:
    """The value of `--input`, of at least so many sizes."""
    sizes = text.split(",")
    if len(sizes) < least or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are channels and sizes, as 3,224,224, or 8,3,224,224")
    return tuple(map(int, sizes))


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number of samples, at least 1")
    return int(text)
