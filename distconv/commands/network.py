"""The model and the machine that a command names, and inputs of the shapes that it names, without numbers."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distconv.job.launcher import BadInput
from distconv.performance.machine import HERE, built_in
from mucudnn import program
from mucudnn.commands.network import INPUT, USUAL, add_network

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    from mucudnn.networks.layers import find, whole_inputs

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


Found = Callable[[argparse.Namespace], tuple[Callable[[], Any], int]]
"""How a command finds what makes the model that its options name, and a usual batch of it."""

Inputs = Callable[[Callable[[], Any], argparse.Namespace, int], Sequence[tuple[int, ...]]]
"""How a command finds the shapes of a model's inputs."""


@contextlib.contextmanager
def named_model(
    options: argparse.Namespace, found: Found, inputs: Inputs
) -> Iterator[tuple[nn.Module, list[Tensor], str]]:
    """A context with the model, its inputs, and the kind of device on which a script most likely computes. Autograd
    records calls unless they infer, and new tensors have the dtype that the options name."""
    import torch

    before = torch.get_default_dtype()
    try:
        build, usual = found(options)
        torch.set_default_dtype(getattr(torch, options.dtype))
        model = build().train(not options.inference)
        given = [torch.empty(shape, device="meta") for shape in inputs(build, options, usual)]
        with torch.set_grad_enabled(not options.inference):
            yield model, given, "cuda" if torch.cuda.is_available() else "cpu"
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def one_line(option: str) -> Iterator[None]:
    """A context in which what fails ends the command: BadInput, one line, which begins with an option."""
    try:
        yield
    except (ValueError, program.NotFound, RuntimeError) as error:
        raise BadInput(" ".join(f"{option}: {error}".split())) from None
