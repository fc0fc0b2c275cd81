"""Checksum: a number that shows whether two tensors are equal bit for bit, computed on the tensor's device."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 16
"""Words that share one set of weights, and are widened at a time on a host: few enough to stay in its caches."""

DEVICE_BLOCKS = 64  # Blocks at a time on a device, where each operator costs a launch: what it widens takes 32 MiB.


def checksum(x: Tensor) -> Tensor:
    """A whole number, int64 of shape (), on the device of a plain tensor of any shape, strides and dtype.

    The bits are read as words of 32, in the order of the elements; each word counts with a weight of its place, and all
    is added up modulo 2^64. The weights are odd and random, the same in every process. So one changed word always
    changes the sum, two that changed places do but for one case in 2^33, and NaNs are equal where their bits are.
    Shape and dtype are not in it. Waits for no device.
    """
    words = _words(x.detach())
    whole, rest = divmod(words.numel(), BLOCK)
    total = _weighted(words[whole * BLOCK :], _weights(x.device)[:rest])
    if not whole:
        return total
    rows = words[: whole * BLOCK].view(whole, BLOCK)
    step = 1 if x.device.type == "cpu" else DEVICE_BLOCKS
    sums = [_weighted(rows[first : first + step], _weights(x.device)) for first in range(0, whole, step)]
    return total + folded(torch.cat(sums))


def folded(sums: Tensor) -> Tensor:
    """One checksum for a list of them, int64 of shape (n,), in its order."""
    if sums.numel() > BLOCK:
        return checksum(sums)
    return (sums * _weights(sums.device)[BLOCK - sums.numel() :].flip(0)).sum()


def checksums(words: Tensor | np.ndarray, ends: tuple[int, ...]) -> Tensor:
    """One checksum for each run of a list of words, int64 of shape (runs,). No run has more than BLOCK of them.

    words: on a host an array, for which torch's functions would take three times as long.
    ends: where each run ends. What is made of them is kept: for a few hundred words, which are read again and again.
    """
    if not isinstance(words, Tensor):
        of_host = _of_runs(torch.device("cpu"), ends)[0].numpy()
        return torch.from_numpy(np.add.reduceat(words * of_host, (0, *ends[:-1])))
    weights, last = _of_runs(words.device, ends)
    sums = (words.to(torch.int64) * weights).cumsum(0)[last]
    return sums.diff(prepend=sums.new_zeros(1))


@functools.lru_cache(maxsize=256)
def _of_runs(device: torch.device, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The weights of all words, and the place of each run's last."""
    weights = [_weights(device)[: end - start] for start, end in itertools.pairwise((0, *ends))]
    return torch.cat(weights), torch.tensor(ends, device=device) - 1


def _words(x: Tensor) -> Tensor:
    """The bits of a tensor as int32, filled up with zeros."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    flat = x.resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # one element, of a tensor that was expanded
        flat = flat.clone(memory_format=torch.contiguous_format)
    size = flat.element_size()
    if size >= 4:
        return flat.view(torch.int32)
    missing = -flat.numel() % (4 // size)
    if missing or flat.storage_offset() * size % 4:
        aligned = flat.new_zeros(flat.numel() + missing)
        aligned[: flat.numel()] = flat
        flat = aligned
    return flat.view(torch.int32)


def _weighted(words: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row of words."""
    return (words.to(torch.int64) * weights).sum(-1)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(20_190_513)
    weights = torch.randint(-(1 << 62), 1 << 62, (BLOCK,), generator=generator, device="cpu", dtype=torch.int64)
    return (2 * weights + 1).to(device)
