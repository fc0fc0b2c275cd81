"""The model and the machine that a command names, and inputs of the shapes that it names, without numbers."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distconv.job.launcher import BadInput
from mucudnn import program
from mucudnn.commands.arguments import INPUT, USUAL

if TYPE_CHECKING:
    from torch import Tensor, nn


def network_of(options: Any) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """The network of NETWORK, without data, and the shapes of its whole inputs by `--input`, `--also` and `--batch`."""
    from distconv.performance.recording import on_meta
    from mucudnn.networks import find, usual_inputs, whole_inputs

    model = on_meta(find(options.network))
    sample, batch = usual_inputs(options.network, options.input, options.batch)
    return model, whole_inputs(model, (sample, *options.also), batch, USUAL)


def names_script(options: argparse.Namespace) -> bool:
    """Whether the target of a command is a script, and not a model."""
    return bool(options.module or os.path.exists(options.target))


def named_script(options: argparse.Namespace) -> Callable[[], None]:
    """Runs the script that the options name. NotFound where there is none."""
    if not names_script(options):
        raise program.NotFound(f"there is no script {options.target!r}; for a model give --input C,H,W, {INPUT}")
    found = program.module(options.target) if options.module else program.script(options.target)
    return lambda: found.run(options.arguments)


def model_builder(options: argparse.Namespace) -> Callable[[], Any]:
    """What makes the model that the options name. NotFound where there is none."""
    from mucudnn.networks import find

    if options.arguments:
        raise program.NotFound(f"arguments {' '.join(options.arguments)} after a model; accepted: after a script")
    if "" not in sys.path:
        sys.path.insert(0, "")  # models of the current folder, as for python -c
    return find(options.target)


def model_inputs(build: Callable[[], Any], options: argparse.Namespace) -> Sequence[tuple[int, ...]]:
    """The shapes of the model's whole inputs."""
    from mucudnn.networks import whole_inputs, without_data

    try:
        return whole_inputs(without_data(build), options.input, options.batch, USUAL)
    except Exception:  # the check of the model shows why it cannot be made, or fails
        return [(options.batch, *each) for each in options.input] if options.batch else options.input


@contextlib.contextmanager
def named_model(options: argparse.Namespace) -> Iterator[tuple[nn.Module, list[Tensor], str]]:
    """A context with the model, its inputs, and the kind of device on which a script most likely computes. Autograd
    records calls unless they infer, and new tensors have the dtype that the options name."""
    import torch

    before = torch.get_default_dtype()
    try:
        build = model_builder(options)
        torch.set_default_dtype(getattr(torch, options.dtype))
        model = build().train(not options.inference)
        given = [torch.empty(shape, device="meta") for shape in model_inputs(build, options)]
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
