"""`distconv.in_turn`: a model computes the parts of its inputs one after another."""

from __future__ import annotations

from distconv.fitting.models import M, fit
from distconv.settings import AUTO
from distconv.turns.turning import read_plan, turn


def in_turn(model: M, parts: str, *, memory: str | float | None = None, results: str | None = None) -> M:
    """Lets a model compute the parts of its inputs one after another, in this process and on its device. Exact.

    Inputs, results and gradients are plain, whole tensors. Where the model, or a module in it, is called from outside
    of the model, its inputs are cut, and each part computes until it needs a result of another part. The same holds for
    a call of the model's method decode, if it has one. If an input is in the host's memory and the model on a GPU, each
    part copies its own piece.

    Args:
        model: is changed in place; its parameters stay as they are.
        parts: axes and the parts along each, such as `"height=8"`. Accepted axes: sample, depth, height, width.
            With `"auto"`, `distconv.fit` chooses them, or another way to keep within the memory.
        memory: the most bytes, such as `"8GiB"`, that tensors of the parts take on the device, besides parameters,
            inputs, results, and the tensors of one operator. The least recently read tensors are moved to a
            file of the temporary folder, or from a GPU to pinned memory of the host. None: all stay on the device. With
            `"auto"` it is the limit of `distconv.fit`, by default the memory that the device has free.
        results: `"host"`: results are in the host's memory, into which each part's piece is copied as soon as it is
            computed; for calls without gradients. `"device"`: on the model's device. None: as `DISTCONV_RESULTS` says.

    Returns:
        The same model.

    Raises:
        ValueError: one line, for parts that are not accepted, here, and where an input lacks a dim that is to be cut.
        RuntimeError: one line, in a job of several ranks.
    """
    if parts == AUTO:
        return fit(model, AUTO if memory is None else memory, results=results)
    return turn(model, read_plan(parts, memory), results, "distconv.in_turn")
