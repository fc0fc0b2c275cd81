"""Random numbers: every part draws what one process would, and the caller goes on behind what the first part drew."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _sources(device_type: str, generators: Sequence[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How to read and to set the state of every generator of the process."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    if device_type == "cuda":
        found.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found.append((numpy.get_state, numpy.set_state))
    return found + [_source(each) for each in generators]


def _source(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Those of a generator of torch, of Python, or of NumPy."""
    if isinstance(generator, torch.Generator):
        write: Any = generator.set_state
        return generator.get_state, write
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    bits = generator.bit_generator
    return lambda: bits.state, functools.partial(setattr, bits, "state")


class RandomNumbers:
    """The states of the generators, of every part. ``generators``: those of the program."""

    def __init__(self, parts: int, device_type: str, generators: Sequence[Any] = ()) -> None:
        self._sources = _sources(device_type, generators)
        self._own = [self._now()] * parts

    def _now(self) -> list[Any]:
        return [read() for read, _ in self._sources]

    def arrive(self, part: int) -> None:
        for (_, write), state in zip(self._sources, self._own[part], strict=True):
            write(state)

    def leave(self, part: int) -> None:
        self._own[part] = self._now()

    def hand_over(self) -> None:
        """The caller goes on behind the first part."""
        self.arrive(0)
