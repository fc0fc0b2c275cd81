"""The random state of a process: Python's, NumPy's and torch's generators, and the entropy of unseeded ones."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import numpy.random.bit_generator
import torch

from mucudnn.process import renewed, substituted

State = tuple[torch.Tensor, tuple[Any, ...], Any, torch.Tensor | None]

KEY_BYTES = 32


def state_of_generators() -> State:
    """The states of torch's, Python's and NumPy's default generators, and of the current GPU's where one is in use."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), device


def set_generators(state: State, *, every_device: bool = False) -> None:
    """Takes a state that `state_of_generators` gave; with `every_device` that of the GPU for each GPU of this process.

    A GPU's state is left as it is where either process has none in use.
    """
    host, python, for_numpy, device = state
    torch.set_rng_state(host)
    random.setstate(python)
    numpy.random.set_state(for_numpy)
    if device is not None and torch.cuda.is_available():
        devices = range(torch.cuda.device_count()) if every_device else [torch.cuda.current_device()]
        for index in devices:
            torch.cuda.set_rng_state(device, index)


def as_text(state: State) -> bytes:
    """A state as JSON, as reading a pickle of another process could run code."""
    host, python, for_numpy, device = state
    return b"[%s,%s,%s,%s]" % (_text(host), _text_of_python(python), _text(for_numpy), _text(device))


def _text(value: Any) -> bytes:
    return json.dumps(value, default=_packed, separators=(",", ":")).encode()


@functools.lru_cache(maxsize=2)
def _text_of_python(state: tuple[Any, ...]) -> bytes:
    """Cached: it takes longest to write, and most programs seldom draw from this generator."""
    return _text(state)


def from_text(text: bytes) -> State:
    """The state that `as_text` wrote."""
    host, (version, internal, gauss), for_numpy, device = json.loads(text, object_hook=_unpacked)
    if isinstance(for_numpy, list):  # torch and NumPy take lists, Python's generator does not
        for_numpy = tuple(for_numpy)
    return host, (version, tuple(internal), gauss), for_numpy, device


def _packed(value: Any) -> dict[str, str]:
    kind, array = ("tensor", value.numpy()) if isinstance(value, torch.Tensor) else ("array", value)
    return {kind: base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.str}


def _unpacked(found: dict[str, Any]) -> Any:
    for kind in ("tensor", "array"):
        if kind in found:
            array = numpy.frombuffer(bytearray(base64.b64decode(found[kind])), found["dtype"])
            return torch.from_numpy(array) if kind == "tensor" else array
    return found


class Entropy:
    """The replacement for the operating system's random numbers: a stream that all processes with one key share.

    Bytes are SHAKE-256 of the key, the purpose, and the number of draws for that purpose. A forked process goes on with
    another key, which is that of the processes that other ranks have forked in the same order.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._forks = key, 0
        self._asked: Counter[str] = Counter()
        self._lock = renewed(threading.Lock())

    def draw(self, purpose: str, size: int) -> bytes:
        """`size` bytes; draws for one purpose do not change those for another."""
        with self._lock:
            self._asked[purpose] += 1
            asked = self._asked[purpose]
        return hashlib.shake_256(self._key + f"{purpose} {asked}".encode()).digest(size)

    def forking(self) -> None:
        """Before a fork, in the parent."""
        self._forks += 1

    def forked(self) -> None:
        """After a fork, in the child."""
        self._key = hashlib.shake_256(self._key + f"fork {self._forks}".encode()).digest(KEY_BYTES)


@contextlib.contextmanager
def common_entropy(key: bytes) -> Iterator[None]:
    """A context in which generators without a seed take one from a stream that all ranks with `key` share.

    These are numpy.random.default_rng(), RandomState() and seed(), random.Random(), random.seed() and SystemRandom,
    secrets, uuid.uuid4, os.urandom and torch.seed().
    """
    entropy = Entropy(key)
    seed_of_random, bits = random.Random.seed, numpy.random.bit_generator

    def randbits(count: int) -> int:
        return int.from_bytes(entropy.draw("numpy", -(-count // 8))) % (1 << count)

    def urandom(size: int) -> bytes:
        return entropy.draw("system", size)

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed_of_random(self, int.from_bytes(entropy.draw("python", 32)) if a is None else a, version)

    def seed_torch() -> int:
        drawn = int.from_bytes(entropy.draw("torch", 8))
        torch.manual_seed(drawn)
        return drawn

    _forking.append(entropy)
    try:
        with (
            substituted(bits, randbits=randbits),
            substituted(os, urandom=urandom),
            substituted(random, _urandom=urandom, seed=seed.__get__(random._inst)),  # SystemRandom's own name for it
            substituted(random.Random, seed=seed),
            substituted(torch, seed=seed_torch),
            substituted(torch.random, seed=seed_torch),
        ):
            yield
    finally:
        _forking.remove(entropy)


_forking: list[Entropy] = []


def _before_fork() -> None:
    for entropy in _forking:
        entropy.forking()


def _after_fork() -> None:
    for entropy in _forking:
        entropy.forked()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
