"""The model that a command names, and inputs of the shapes that it names, none of which have numbers."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distconv.job.launcher import BadInput
from mucudnn import program

if TYPE_CHECKING:
    from torch import Tensor, nn

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
