"""The network that a command examines: its name, the shape of a sample, and the size of the mini-batch."""

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
"""The values of NETWORK, for a help text."""

INPUT = "the shape of one sample, or, samples first, of the whole input: whichever the network takes"
"""The values of `--input`, for a help text."""

USUAL = 32  # Samples, where nothing says how many.


def add_network(parser: Parser) -> None:
    """NETWORK with its `--input` and `--batch`."""
    parser.add_argument("network", metavar="NETWORK", help="the network")
    parser.add_argument("--input", type=parse_shape, metavar="C,H,W", help=f"{INPUT} (default: as the network says)")
    add_batch(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """`--batch`."""
    parser.add_argument(
        "--batch", type=_count, metavar="N", help=f"samples (default: the network's usual number, or {USUAL})"
    )


def layers_of(arguments: Any) -> list[LayerCall]:
    """The convolutions of one training step of the network, on the samples of `--batch` or `--input`.

    Raises:
        NotFound: where there is no such network, or the shape of a sample is not known.
    """
    from mucudnn.networks import layers  # which needs torch; the options above do not
    from mucudnn.networks.layers import whole_inputs

    network = layers.find(arguments.network)
    given = arguments.input or network.input_shape
    if given is None:
        raise NotFound(f"the input of {arguments.network} is not known: give --input C,H,W, {INPUT}")
    model = layers.without_data(network.build)
    (whole,) = whole_inputs(model, [given], arguments.batch, network.batch or USUAL)
    return layers.convolutional(network.build, whole)


def parse_shape(text: str) -> tuple[int, ...]:
    """The value of `--input`."""
    sizes = text.split(",")
    if len(sizes) < 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are channels and sizes, as 3,224,224, or 8,3,224,224")
    return tuple(map(int, sizes))


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number of samples, at least 1")
    return int(text)
