"""Chooses the parts of a call where none are named, and reports them at the first call with inputs of such shapes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distconv import settings
from distconv.model.direct.chains.choice import Prices
from distconv.model.halos import prices_of
from distconv.settings.partition import AXES, Kind, Partition
from distconv.tensors.gathering.memory import free_here
from distconv.turns.choosing import PartsChoice, choose_parts
from distconv.turns.following import Followed, call_kind, follow_call
from mucudnn.process.warning import print_line
from mucudnn.sizes import format_bytes
from mucudnn.timing.progress import bar

_chosen: weakref.WeakKeyDictionary[nn.Module, dict[Any, PartsChoice]] = weakref.WeakKeyDictionary()


SHARE = 0.8  # The share of a device's free memory that parts may take where no limit is named; the rest is for results.


@functools.cache
def spare(device_type: str) -> int:
    """The limit of memory where none is named; it is printed once, when it is first asked for."""
    free = free_here(device_type)
    limit = int(SHARE * free)
    print_line(f"distconv: --parts auto without --memory: {format_bytes(limit)}, of {format_bytes(free)} that are free")
    return limit


def extents_of(inputs: Sequence[Tensor]) -> dict[str, int]:
    """The extents that can be cut, by axis, of the largest input among those with the most dims."""
    x = max(inputs, key=lambda each: (each.dim(), each.numel()), default=torch.empty(()))
    dims = {axis.name: axis.dim_of(x.dim()) for axis in AXES.values() if axis.kind is not Kind.CHANNELS}
    return {name: x.shape[dim] for name, dim in dims.items() if dim is not None and x.shape[dim] > 1}


@contextlib.contextmanager
def followed_as(trained: bool) -> Iterator[None]:
    """A context in which calls are followed, with their backward if they are ``trained``."""
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        yield


def in_chains(chained: bool) -> contextlib.AbstractContextManager[None]:
    """A context in which layers are computed in chains, if they are to be; else as the job's setting says."""
    return settings.within_call({"halo": "chain"}) if chained else contextlib.nullcontext()


def chain_prices(device: str) -> Prices | None:
    """The prices that decide on chains; None, where the job's setting has chains anyway."""
    return None if settings.value("halo") else prices_of(device)


def chosen(module: nn.Module, args: Any, kwargs: Any, inputs: Sequence[Tensor], memory: int) -> PartsChoice:
    """The parts of a call within a limit of memory, and whether they compute in chains.

    Raises:
        ValueError: one line, where the call cannot be followed by the shapes of its tensors.
    """
    of_module = _chosen.setdefault(module, {})
    trained, *others = call_kind(module, inputs)
    key = memory, trained, *others
    if key not in of_module:
        with bar(None, "distconv: choosing parts") as advance, followed_as(trained):
            try:
                alone = follow_call(module, args, kwargs, None, backward=trained)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"parts 'auto': a call of {type(module).__name__} cannot be followed without numbers"
                    f" ({reason[:300]}); accepted: axis=parts,..."
                ) from None

            def followed(parts: Partition, chained: bool) -> Followed:
                advance()
                with in_chains(chained):
                    return follow_call(module, args, kwargs, parts, memory, trained)

            device = next((p.device.type for p in module.parameters()), "cpu")
            choice = choose_parts(alone, followed, extents_of(inputs), memory, chain_prices(device))
        print_line(f"distconv: --parts auto: {choice_line(type(module).__name__, choice, alone, memory)}")
        of_module[key] = choice
    return of_module[key]


def choice_line(name: str, choice: PartsChoice, alone: Followed, memory: int) -> str:
    """The choice in one line."""
    taken = choice.taken
    if choice.partition is None and choice.fits:
        return f"{name} runs whole, and takes at most {format_bytes(alone.peak)}"
    parts = "whole" if choice.partition is None else f"as {choice.partition}{' in chains' if choice.chained else ''}"
    line = (
        f"{name} runs {parts}, and takes at most {format_bytes(taken.peak)} ({format_bytes(alone.peak)} in one process)"
        f"; {format_bytes(taken.spilled)} leave the device, {format_bytes(taken.fetched)} come back"
    )
    return line if choice.fits else f"{line}; {exceeded(choice, memory)}"


def exceeded(choice: PartsChoice, memory: int) -> str:
    """A clause that says that no parts keep within the limit."""
    besides = format_bytes(choice.taken.whole + choice.taken.results)
    return f"no parts keep within {format_bytes(memory)} besides {besides} of parameters, inputs and results"
