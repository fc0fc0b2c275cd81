"""The inputs of a model's call: lists and dicts among them, images in a list, and inputs too small for the ranks.

While a model runs, its inputs are other tensors than the caller's, so it is given copies of the lists and dicts that
contain them. An example is a cache of features that passes from one call to the next. Changes that the model makes in
them are made in the caller's too.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.settings.partition import AXES, Kind, nested_ownership
from distconv.tensors.mesh import axis_names, placements
from mucudnn.process import print_line

Container = list[Any] | dict[Any, Any] | deque[Any]


class Containers:
    """The lists and dicts of a caller, each beside the copy that the model is given."""

    def __init__(self, given: Any, entered: Any) -> None:
        self._pairs = [(callers, copy, _items(callers), _items(copy)) for callers, copy in _pairs(given, entered)]

    def give_back(self, converted: Callable[[Any], Any] = lambda item: item) -> None:
        """Makes the changes of each copy in the caller's list or dict.

        An item that the model was given becomes the caller's original again; any other one is ``converted``.
        """
        for callers, copy, before, entered in self._pairs:
            after = _items(copy)
            if len(after) == len(entered) and all(
                a[0] == b[0] and a[1] is b[1] for a, b in zip(after, entered, strict=True)
            ):
                continue
            originals = {id(received): item for (_, received), (_, item) in zip(entered, before, strict=True)}
            items = [(key, originals[id(item)] if id(item) in originals else converted(item)) for key, item in after]
            callers.clear()
            if isinstance(callers, dict):
                callers.update(items)
            else:
                callers.extend(item for _, item in items)


def _pairs(given: Any, entered: Any) -> Iterator[tuple[Container, Container]]:
    if isinstance(given, list | dict | deque) and entered is not given:
        yield given, entered
    if isinstance(given, list | dict | deque | tuple):
        for (_, item), (_, copy) in zip(_items(given), _items(entered), strict=True):
            if item is not copy:
                yield from _pairs(item, copy)


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def refuse_images(value: Any, what: str, mesh: DeviceMesh) -> None:
    """ValueError, one line, for a list of images (channels, height, width) that the mesh cannot partition.

    Tensors (samples, channels, length) in a list are no images: all have one shape, and the mesh none but their axes.
    Neither are those beside a batch, such as boxes (samples, boxes, numbers) beside a batch of pictures.
    """
    tensors = [x for x in value if isinstance(x, Tensor)] if isinstance(value, list | tuple) else []
    images = [x for x in tensors if x.dim() == 3]
    if not images or any(x.dim() > 3 for x in tensors):
        return
    try:
        placements(mesh, 3)
        fits = len({x.shape for x in images}) == 1
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{what} is a list of {len(images)} tensors of 3 dims, such as {tuple(images[0].shape)}, as detection"
            f" models take images: each is no batch to be partitioned. Accepted: one tensor (samples, channels,"
            f" spatial dims)."
            f" In a program, parallelize the part that gets one and gather what it gives: distconv.parallelize("
            f"model.backbone, mesh).register_forward_hook(lambda module, x, y: tree_map_only(DTensor, distconv.gather,"
            f" y))"
        )


_warned: set[str] = set()


def warn_of_idle(model: str, mesh: DeviceMesh, inputs: Sequence[Tensor]) -> None:
    """Prints a line if some ranks have no part of the largest whole input (N, C, spatial...); once in a process."""
    x = max(inputs, key=lambda each: each.numel(), default=None)
    if _warned or x is None or x.dim() < 3 or not x.numel():
        return
    axes = tuple(zip(axis_names(mesh), mesh.shape, strict=True))
    working = working_ranks(axes, tuple(x.shape))
    if working < math.prod(size for _, size in axes):
        _warned.add(model)
        if dist.get_rank() == 0:
            partition, ranks = ",".join(f"{name}={size}" for name, size in axes), mesh.size()
            line = f"under {partition} only {working} of {ranks} ranks have a part of it, and the others idle"
            advice = "give an axis at most as many ranks as there are samples, or rows"
            print_line(f"distconv: {model} is called with {tuple(x.shape)}: {line}; {advice}")


@functools.lru_cache(maxsize=1024)
def working_ranks(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> int:
    """How many ranks have a part of a tensor. An axis of channels counts as full: an input may have few channels.

    Args:
        axes: names and sizes of the mesh.
        shape: (N, C, spatial...).
    """
    found, sizes = 1, dict[int, list[int]]()
    for name, size in axes:
        axis = AXES.get(name)
        dim = None if axis is None or axis.kind is Kind.CHANNELS else axis.dim_of(len(shape))
        if dim is None:
            found *= size
        else:
            sizes.setdefault(dim, []).append(size)
    for dim, each in sizes.items():
        found *= sum(start < stop for start, stop in nested_ownership(shape[dim], tuple(each)))
    return found
