"""Lets every part draw the random numbers that one process would; the caller goes on behind those of the first part."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

State = Any


class _Source:
    """A generator, by the functions that read and set its state."""

    def __init__(self, read: Callable[[], State], write: Callable[[State], None]) -> None:
        self.read, self.write = read, write


class _MersenneTwister:
    """A Mersenne twister of Python or NumPy. Its states take long to read and to set, so both are done only where the
    generator's memory shows that the state is another one.

    ``memory``: the address of its 624 words and its position, in that order or the other one; ``words``: the same bytes
    of a state; ``normal``: whether a state may also keep a normal number for the next draw.
    """

    def __init__(
        self,
        source: _Source,
        memory: Callable[[], int | None],
        words: Callable[[State], bytes],
        normal: Callable[[State], bool],
    ) -> None:
        self._source, self._memory, self._normal = source, memory, normal
        self._state, self._seen = source.read(), self._now()
        self.is_known = words(self._state) == self._seen

    def _now(self) -> bytes | None:
        at = self._memory()
        return None if at is None else ctypes.string_at(at, _STATE_BYTES)

    def read(self) -> State:
        """The state; the same object as before if no number was drawn."""
        now = self._now()
        if now is None or now != self._seen or self._normal(self._state):
            self._state, self._seen = self._source.read(), now
        return self._state

    def write(self, state: State) -> None:
        """Sets a state. Nothing may have been drawn since the last one was read."""
        if state is not self._state:
            self._source.write(state)
            self._state, self._seen = state, self._now()


_STATE_BYTES = 4 * 625


def _python_source() -> _Source | _MersenneTwister:
    """The source of the module ``random``."""
    source = _Source(random.getstate, random.setstate)
    twister: Any = random.getstate.__self__  # type: ignore[attr-defined]
    at = id(twister) + object.__basicsize__

    def words(state: State) -> bytes:
        return struct.pack("=i624I", state[1][-1], *state[1][:-1])

    found = _MersenneTwister(source, lambda: at, words, lambda state: state[2] is not None)
    return found if found.is_known else source


def _numpy_source(numpy: Any) -> _Source | _MersenneTwister:
    """The source of the module ``numpy.random``."""
    source = _Source(numpy.get_state, numpy.set_state)
    generator: Callable[[], Any] = getattr(numpy, "get_bit_generator", lambda: None)

    def memory() -> int | None:
        bits = generator()
        return bits.ctypes.state_address if type(bits) is numpy.MT19937 else None

    if memory() is None:
        return source

    def words(state: State) -> bytes:
        return bytes(state[1].tobytes() + struct.pack("=i", state[2]))

    found = _MersenneTwister(source, memory, words, lambda state: not isinstance(state, tuple) or bool(state[3]))
    return found if found.is_known else source


def _sources(device_type: str, generators: Sequence[Any]) -> list[_Source | _MersenneTwister]:
    """All generators of the process."""
    found: list[_Source | _MersenneTwister] = [_Source(torch.get_rng_state, torch.set_rng_state), _python_source()]
    if device_type == "cuda":
        found.append(_Source(torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    if "numpy" in sys.modules:
        found.append(_numpy_source(sys.modules["numpy"].random))
    return found + [_source(each) for each in generators]


def _source(generator: Any) -> _Source:
    """A generator of torch, of Python, or of NumPy."""
    if isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate)
    if hasattr(generator, "set_state"):
        return _Source(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return _Source(lambda: bits.state, functools.partial(setattr, bits, "state"))


def state_of(generator: Any) -> bytes:
    """The state of a generator of the program, as bytes."""
    with _disable_current_modes():  # in a mode without numbers, those of a tensor that has some cannot be read
        state = _source(generator).read()
        return bytes(state.numpy()) if isinstance(state, torch.Tensor) else pickle.dumps(state)


class RandomNumbers:
    """The states of all generators, for every part. ``generators``: those of the program, besides the global ones."""

    def __init__(self, parts: int, device_type: str, generators: Sequence[Any] = ()) -> None:
        self._sources = _sources(device_type, generators)
        self._own = [self._now()] * parts

    def _now(self) -> list[State]:
        return [source.read() for source in self._sources]

    def arrive(self, part: int | None) -> None:
        if part is not None:
            for source, state in zip(self._sources, self._own[part], strict=True):
                source.write(state)

    def leave(self, part: int) -> None:
        self._own[part] = self._now()

    def hand_over(self) -> None:
        """Gives the caller the states of the first part."""
        self._now()  # so that a twister notices numbers that were drawn since
        self.arrive(0)
