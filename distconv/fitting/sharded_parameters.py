"""The memory of parameters that are sharded along all axes (`--shard-parameters`), while a call is computed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from distconv.fitting.recorder import Recorder, local_tensor
from distconv.model import parameter_gathers, scattered_gradients
from distconv.model.fully_sharded import is_fully_sharded


def bytes_here(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors on this rank."""
    return sum(x.numel() * x.element_size() for x in map(local_tensor, tensors))


def sharded_bytes(module: nn.Module) -> int:
    """The bytes on this rank of a module's parameters that are sharded along all axes."""
    return bytes_here(filter(is_fully_sharded, module.parameters()))


def count_shards(module: nn.Module, copied: nn.Module, recorder: Recorder) -> None:
    """Counts parameters that are sharded along all axes, and their gradients, with their bytes on this rank, and those
    that are gathered, or whose gradients' sums travel, at any time as the largest ones.

    ``copied``: the copy of the module whose call was recorded, with whole parameters.
    """
    timeline, sizes = recorder.timeline, []
    for x, whole in zip(module.parameters(), copied.parameters(), strict=True):
        if not is_fully_sharded(x):
            continue
        here, size = bytes_here([x]), whole.numel() * whole.element_size()
        number = recorder.number_of(whole)
        gradient = None if whole.grad is None else recorder.number_of(whole.grad)
        for each in (number, gradient):
            if each is not None:
                timeline.storages[each].size = here
        if number is not None:
            timeline.initial -= size - here
            timeline.gathered[number] = size
        sizes.append(size)
    sizes.sort(reverse=True)
    # One more is on its way, and one is copied to its memory format.
    gathered = sum(sizes[: parameter_gathers.AT_ONCE + 2])
    summed = sum(sizes[: scattered_gradients.AT_ONCE + 1])
    for tick in range(len(timeline.scratch)):
        timeline.scratch[tick] += gathered + (summed if tick >= timeline.forward else 0)
