"""The network that a command looks at: its name, the shape of a sample, the size of the mini-batch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mucudnn.commands.arguments import Parser
from mucudnn.program import NotFound

if TYPE_CHECKING:
    from mucudnn.networks.layers import LayerCall

NAMES = (
    "NETWORK is module:attribute or file.py:attribute, the attribute a torch.nn.Module or something that\n"
    "makes one; or the name of a network that ships with mucudnn, such as resnet18."
)
"""What NETWORK may be, for a help text."""


def add_network(parser: Parser, nargs: str | None = None) -> None:
    """NETWORK with its `--input` and `--batch`; with `nargs` "?" it may be left out."""
    parser.add_argument("network", metavar="NETWORK", nargs=nargs, help="the network")
    parser.add_argument("--input", type=_shape, metavar="C,H,W", help="the shape of one sample")
    parser.add_argument(
        "--batch", type=_count, metavar="N", help="samples (default: the network's usual number, or 32)"
    )


def layers_of(arguments: Any) -> list[LayerCall]:
    """The convolutions of one training step of the network.

    Raises:
        NotFound: where there is no such network, or the shape of a sample is not known.
    """
    from mucudnn.networks import layers  # which needs torch; the options above do not

    network = layers.find(arguments.network)
    shape = arguments.input or network.input_shape
    if shape is None:
        raise NotFound(f"{arguments.network} does not tell its input: give --input C,H,W, the shape of one sample")
    return layers.convolutional(network.build, (arguments.batch or network.batch or 32, *shape))


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) not in (2, 3, 4) or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are channels and 1 to 3 sizes, as 3,224,224")
    return shape


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number of samples, at least 1")
    return int(text)
