"""Samples: some elements of each of many tensors, read all at once, by which it is noticed that one was changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from distconv.agreement.checksum import checksums

RUN = 12
"""So many elements are looked at in each of three places of a tensor: its first, some in the middle, and its last."""

Key = tuple[int, int]
"""An id of a tensor, and the place of its memory."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SampledElements:
    """Of tensors that a process has, as long as they stay where they are. What it keeps keeps their memory alive."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._views: dict[Key, list[Tensor]] = {}
        self._together: list[tuple[list[Tensor], list[Key], tuple[int, ...]]] = []
        """What is read at once: views, the tensors that they are of, and where the words of each tensor end."""

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
        self._together = [
            (
                [view for _, views in group for view in views],
                [key for key, _ in group],
                tuple(itertools.accumulate(sum(view.numel() for view in views) for _, views in group)),
            )
            for group in kinds.values()
        ]

    def read(self) -> list[Tensor]:
        """The elements now, as words, on their devices."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return [torch.cat(views) for views, _, _ in self._together]

    def changed(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Key]:
        """The tensors of which something was read that is not the same before and after. Waits for their devices."""
        return self.compared(before, after)()

    def compared(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> Callable[[], list[Key]]:
        """Begins to find what `changed` returns. Asked for later, it waits for nothing that devices do since."""
        found: list[tuple[Tensor, list[Key], tuple[int, ...]]] = []
        arrived = []
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for one, other, (_, keys, ends) in zip(before, after, self._together, strict=True):
                if not one.is_cuda:
                    if not torch.equal(one, other):
                        found.append((one != other, keys, ends))
                    continue
                # Into memory that is not pinned a copy would wait for the stream.
                here = torch.empty(one.shape, dtype=torch.bool, pin_memory=True)
                found.append((here.copy_(one != other, non_blocking=True), keys, ends))
                arrived.append(torch.cuda.current_stream(one.device).record_event())

        def find() -> list[Key]:
            for event in arrived:
                if not event.query():
                    event.synchronize()
            places = [(np.flatnonzero(differ.numpy()), keys, ends) for differ, keys, ends in found]
            return [
                keys[at]
                for where, keys, ends in places
                for at in sorted(set(np.searchsorted(ends, where, side="right").tolist()))
            ]

        return find

    def texts(self, read: Sequence[Tensor]) -> dict[Key, bytes]:
        """What was read of each tensor."""
        found: dict[Key, bytes] = {}
        for words, (_, keys, ends) in zip(read, self._together, strict=True):
            text, size = words.cpu().numpy().tobytes(), words.element_size()
            starts = (0, *ends[:-1])
            found.update((key, text[size * a : size * b]) for key, a, b in zip(keys, starts, ends, strict=True))
        return found

    def sums(self, read: Sequence[Tensor]) -> list[tuple[list[Key], Tensor]]:
        """Checksums of what was read of each tensor, int64 of shape (n,), and the tensors; for each device and type."""
        return [(keys, checksums(words, ends)) for words, (_, keys, ends) in zip(read, self._together, strict=True)]


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
