"""The network and the machine for commands that predict steps."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distconv.job.launcher import BadInput
from distconv.performance.machine import HERE, built_in
from mucudnn.commands.network import INPUT, USUAL, add_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def add_network_and_machine(parser: Any) -> None:
    """NETWORK with its input and batch, the machine, and what batch norm does."""
    add_network(parser)
    parser.add_argument(
        "--also",
        type=_shape,
        action="append",
        default=[],
        metavar="C,H,W",
        help="the shape of a further input of the model, as that of --input; may be given more than once",
    )
    parser.add_argument(
        "--machine",
        default=HERE,
        metavar="FILE",
        help=f"a machine file, here (this machine: the default, see calibrate), or one of {', '.join(built_in())}",
    )
    parser.add_argument(
        "--batch-norm", choices=["global", "local"], default="global", help="as of distconv run (default: global)"
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors in the user's input into one line."""
    from mucudnn.program import NotFound

    try:
        yield
    except (NotFound, ValueError, OSError) as error:
        raise BadInput(str(error).splitlines()[0]) from None


@dataclass(frozen=True)
class Asked:
    """The network that is planned."""

    model: nn.Module  # Without data.
    samples: tuple[tuple[int, ...], ...]  # The shape of one sample of each of its inputs.
    batch: int  # Samples of a step.

    def inputs(self) -> list[tuple[int, ...]]:
        """The shapes of its whole inputs."""
        return [(self.batch, *sample) for sample in self.samples]


def network_of(options: Any) -> Asked:
    """The network of NETWORK, `--input`, `--also` and `--batch`. ValueError, one line, where its input is not known."""
    from distconv.performance.recording import on_meta
    from mucudnn.networks.inputs import whole_inputs
    from mucudnn.networks.layers import find

    found = find(options.network)
    shape = options.input or found.input_shape
    if shape is None:
        raise ValueError(f"the input of {options.network} is not known: give --input C,H,W, {INPUT}")
    model = on_meta(found.build)
    whole = whole_inputs(model, (shape, *options.also), options.batch, found.batch or USUAL)
    return Asked(model, tuple(each[1:] for each in whole), whole[0][0])


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are sizes, as 3,224,224, or 16")
    return tuple(map(int, sizes))
