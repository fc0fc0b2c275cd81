"""The inputs of a network, from the shape of one sample or of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mucudnn.program import NotFound

Shape = tuple[int, ...]


def whole_inputs(model: nn.Module, given: Sequence[Shape], batch: int | None, usual: int) -> tuple[Shape, ...]:
    """The shapes of whole inputs, samples first: of so many samples as given, or as given, whichever the model takes.

    Args:
        model: on the meta device.
        given: the shape of each input, without samples or with them.
        batch: samples that were asked for, `None` for as many as `given` has, else `usual`.

    Raises:
        NotFound: one line, for a model that takes neither.
    """
    samples = tuple((batch or usual, *shape) for shape in given)
    refusals = [_refusal(model, samples)]
    if refusals[0] is None:
        return samples
    if all(batch in (None, shape[0]) for shape in given):
        refusals.append(_refusal(model, given))
        if refusals[-1] is None:
            return tuple(given)
    given_shapes = " and ".join(",".join(map(str, shape)) for shape in given)
    asked = "" if batch is None else f" with --batch {batch}"
    why = "; as the whole input: ".join(map(str, refusals))
    raise NotFound(f"{type(model).__name__} does not take --input {given_shapes}{asked}; as one sample: {why}")


def _refusal(model: nn.Module, shapes: Sequence[Shape]) -> str | None:
    """Why a model does not take inputs; `None` where it does."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        with torch.no_grad():
            model(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    except Exception as error:  # a model's own code may fail in any way
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
