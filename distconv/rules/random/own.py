"""Random numbers of a shard's own, equal on its replicas, and numbers from a generator of the script.

All ranks advance the default generator in the same way, by one number per call, so that later draws of a script agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distconv.tensors.layouts import Layout
from distconv.tensors.mesh import sharded_dims


def seed_of_shards() -> torch.Tensor:
    """The number that all ranks take from the default generator for one call."""
    return torch.randint(1 << 62, ())


def shard_coordinates(where: Layout) -> list[int]:
    """Which shard of a tensor this rank has."""
    mesh, placements = where
    return [mesh.get_local_rank(axis) for axis, _ in sharded_dims(mesh, placements)]


@contextlib.contextmanager
def own_numbers(seed: int, shard: Sequence[int], device: torch.device) -> Iterator[None]:
    """Random numbers within are drawn from a generator state of this shard; then the default one continues."""
    for coordinate in shard:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + coordinate) % (1 << 63)
    source: Any = torch.cuda if device.type == "cuda" else torch
    state = source.get_rng_state()
    try:
        source.manual_seed(seed)
        yield
    finally:
        source.set_rng_state(state)


@contextlib.contextmanager
def numbers_of(generator: torch.Generator | None) -> Iterator[None]:
    """A context in which the default generator goes on from the state of the script's own, and hands it back."""
    if generator is None:
        yield
        return
    source: Any = torch.cuda if generator.device.type == "cuda" else torch
    state = source.get_rng_state()
    source.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(source.get_rng_state())
        source.set_rng_state(state)
