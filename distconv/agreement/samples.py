"""Checksums, which show whether two tensors are equal bit for bit, and samples, by which it is noticed that one of many
tensors was changed: some elements of each, read all at once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

RUN = 12
"""So many elements are looked at in each of three places of a tensor: its first, some in the middle, and its last."""

Key = tuple[int, int]  # An id of a tensor, and the place of its memory.

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Group(NamedTuple):
    """Elements of tensors of one device and dtype, which are read at once."""

    views: list[Tensor]
    keys: list[Key]  # The tensors, in the order of their views.
    ends: tuple[int, ...]  # Where the words of each tensor end.
    memory: list[ctypes.Array[ctypes.c_char]]
    """On a host, that of the views, which is read past torch: its own functions would take ten times as long."""
    firsts: list[Tensor]  # The first view of each tensor.
    addresses: list[int]  # Where the memory of these was.


Words = Tensor | bytearray
"""The elements that were read of a group: on a host as bytes, empty if memory was moved or freed since."""


class SampledElements:
    """Some elements of tensors, which are read again and again while their memory stays the same, and is kept alive."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._views: dict[Key, list[Tensor]] = {}
        self._groups: list[_Group] = []

    def of(self, tensors: Sequence[Tensor], ids: list[int], pointers: list[int]) -> None:
        """Looks at tensors from now on, whose memory is at ``pointers``. ``ids``: of them, or of what has them."""
        if ids == self._ids and pointers == self._pointers:
            return
        self._ids, self._pointers = ids, pointers
        before, self._views = self._views, {}
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Key, list[Tensor]]]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for x, key in zip(tensors, zip(ids, pointers, strict=True), strict=True):
                if key not in self._views:
                    views = self._views[key] = before.get(key) or list(_views(x))
                    if views:
                        kinds.setdefault((views[0].device, views[0].dtype), []).append((key, views))
        # In the same order on ranks of which some have no elements of a tensor.
        self._groups = [
            _grouped(device, group) for (device, _), group in sorted(kinds.items(), key=lambda of: str(of[0]))
        ]

    def read(self) -> list[Words]:
        """The elements now, as words, on their devices."""
        return [_read(group) for group in self._groups]

    def changed(self, before: Sequence[Words], after: Sequence[Words]) -> list[Key]:
        """The tensors of which something was read that is not the same before and after. Waits for their devices."""
        return self.compared(before, after)()

    def compared(self, before: Sequence[Words], after: Sequence[Words]) -> Callable[[], list[Key]]:
        """Begins to find what `changed` returns. Asked for later, it waits for nothing that devices do since."""
        found: list[tuple[_Group, Any]] = []
        arrived = []
        for one, other, group in zip(before, after, self._groups, strict=True):
            if isinstance(one, bytearray) and isinstance(other, bytearray):
                if one != other:
                    found.append((group, _differing(group, one, other)))
                continue
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                differ = torch.ne(one, other)  # type: ignore[arg-type]
                # Into memory that is not pinned a copy would wait for the stream.
                here = torch.empty(differ.shape, dtype=torch.bool, pin_memory=differ.is_cuda)
                found.append((group, here.copy_(differ, non_blocking=True)))
                if differ.is_cuda:
                    arrived.append(torch.cuda.current_stream(differ.device).record_event())

        def find() -> list[Key]:
            for event in arrived:
                if not event.query():
                    event.synchronize()
            return [
                group.keys[at]
                for group, differ in found
                for at in sorted(set(np.searchsorted(group.ends, np.flatnonzero(differ), side="right").tolist()))
            ]

        return find

    def texts(self, read: Sequence[Words]) -> dict[Key, bytes]:
        """The elements that were read of each tensor."""
        found: dict[Key, bytes] = {}
        for words, (views, keys, ends, *_) in zip(read, self._groups, strict=True):
            text = words.cpu().numpy().tobytes() if isinstance(words, Tensor) else bytes(words)
            size, starts = views[0].element_size(), (0, *ends[:-1])
            found.update((key, text[size * a : size * b]) for key, a, b in zip(keys, starts, ends, strict=True))
        return found

    def keys(self) -> list[tuple[torch.device, list[Key]]]:
        """The tensors of each device and type."""
        return [(group.views[0].device, group.keys) for group in self._groups]

    def sums(self, read: Sequence[Words]) -> list[Tensor]:
        """Checksums of what was read of each tensor, int64 of shape (n,), in the order of `keys`."""
        return [
            checksums(words if isinstance(words, Tensor) else _numbers(group, words), group.ends)
            for words, group in zip(read, self._groups, strict=True)
        ]


def _grouped(device: torch.device, group: Sequence[tuple[Key, list[Tensor]]]) -> _Group:
    views = [view for _, views in group for view in views]
    ends = tuple(itertools.accumulate(sum(view.numel() for view in views) for _, views in group))
    sizes = [view.numel() * view.element_size() for view in views if device.type == "cpu"]
    memory = [(ctypes.c_char * size).from_address(x.data_ptr()) for size, x in zip(sizes, views, strict=False)]
    firsts = [views[0] for _, views in group]
    return _Group(views, [key for key, _ in group], ends, memory, firsts, [*map(Tensor.data_ptr, firsts)])


def _read(group: _Group) -> Words:
    if group.memory:
        are_there = [*map(Tensor.data_ptr, group.firsts)] == group.addresses
        return bytearray().join(group.memory) if are_there else bytearray()
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return torch.cat(group.views)


def _numbers(group: _Group, words: bytearray) -> np.ndarray:
    size = group.views[0].element_size()
    return np.frombuffer(words, np.uint8 if size == 1 else f"i{size}")


def _differing(group: _Group, one: bytearray, other: bytearray) -> np.ndarray:
    """Whether each word differs; all do where the memory of one was moved or freed."""
    if len(one) != len(other):
        return np.ones(group.ends[-1], bool)
    return np.not_equal(_numbers(group, one), _numbers(group, other))


def _views(x: Tensor) -> Iterator[Tensor]:
    """Elements of a tensor as words, in its own memory: runs of them, which are read at once in a tenth of the time."""
    if type(x) not in (Tensor, nn.Parameter) and not _is_parameter(x):
        return
    number = x.numel()
    if not number or x.is_meta or x.layout is not torch.strided or x.is_quantized or x.is_conj() or x.is_neg():
        return
    with torch._C.DisableTorchFunction():
        flat = x.detach()
        if 1 + sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True)) == number:
            flat = flat.as_strided((number,), (1,))
        else:  # with gaps, or elements that share memory
            flat = flat.as_strided((min(*x.shape, RUN),), (sum(x.stride()),))
            number = flat.numel()
        starts = (0, (number - RUN) // 2, number - RUN) if number > 3 * RUN else (0,)
        for start in starts:
            run = flat[start : start + RUN if len(starts) > 1 else number]
            if run.element_size() in _WORDS:
                yield run.view(_WORDS[run.element_size()])
            else:
                yield from (part.view(torch.int64) for part in torch.view_as_real(run).unbind(-1))


def _is_parameter(x: Tensor) -> bool:
    """Whether it is a plain one, perhaps in use."""
    return not isinstance(x, FakeTensor) and getattr(type(x), "kind", None) in (Tensor, nn.Parameter)


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
