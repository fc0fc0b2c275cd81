"""The network that a command examines: its name, the shape of a sample, and the size of the mini-batch."""

from __future__ import annotations

import argparse

from mucudnn.commands.arguments import Parser

NAMES = (
    "NETWORK is module:attribute or file.py:attribute, the attribute a torch.nn.Module or something that\n"
    "makes one, such as torchvision.models:resnet18."
)
"""The values of NETWORK, for a help text."""

INPUT = "the shape of one sample, or, samples first, of the whole input: whichever the network takes"
"""The values of `--input`, for a help text."""

USUAL = 32  # Samples, where nothing says how many.


def add_network(parser: Parser) -> None:
    """NETWORK with its `--input` and `--batch`."""
    parser.add_argument("network", metavar="NETWORK", help="the network")
    parser.add_argument("--input", type=parse_shape, required=True, metavar="C,H,W", help=INPUT)
    add_batch(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """`--batch`."""
    parser.add_argument("--batch", type=_count, metavar="N", help=f"samples (default: those of --input, or {USUAL})")


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
