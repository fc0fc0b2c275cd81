"""Lets a model run in parts that are named, one after another."""

from __future__ import annotations

from distconv.fitting.models import M, fit
from distconv.settings import AUTO
from distconv.turns.turning import read_way, turn


def in_turn(model: M, parts: str, *, memory: str | float | None = None, results: str | None = None) -> M:
    """Lets a model compute the parts of its inputs one after another, in this process and on its device. Exact.

    What it is given and gives are plain, whole tensors, and so are gradients. Where the model, or a module in it, is
    called from outside of it, inputs are cut, and each part is computed up to where it needs what another one makes.
    So is a call of its method decode, if it has one. Of an input in the host's memory, each part copies its own piece
    to a model on a GPU.

    Args:
        model: is changed in place; its parameters stay as they are.
        parts: axes and the parts along each, such as `"height=8"`. Accepted axes: sample, depth, height, width.
            With `"auto"`, `distconv.fit` chooses them, or another way to keep within the memory.
        memory: the most bytes, such as `"8GiB"`, that tensors of the parts take on the device, besides parameters, what
            the model is given and gives, and what one operator needs. What was not read for longest is kept in a file
            of the temporary folder, or for a GPU in pinned memory of the host. None: all stays on the device; with
            `"auto"`, where it is the limit of `distconv.fit`, what the device has free.
        results: `"host"`: results are in the host's memory, into which each part's piece is copied as soon as it is
            computed; of calls without gradients. `"device"`: on the model's device. None: as `DISTCONV_RESULTS` says.

    Returns:
        The same model.

    Raises:
        ValueError: one line, for parts that are not accepted, here, and where an input lacks a dim that is to be cut.
        RuntimeError: one line, in a job of several ranks.
    """
    if parts == AUTO:
        return fit(model, AUTO if memory is None else memory, results=results)
    return turn(model, read_way(parts, memory), results, "distconv.in_turn")
