"""A draft: a batch whose parts are still to be read, and how a store supplies them in place of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from distconv.reading.expression import Expression
from distconv.reading.source import Source
from distconv.reading.view import Region


@dataclass(frozen=True)
class Unread:
    """A rank's part of a batch, `shape` (samples, ...) without the cuts; `checksum` as in `Slab`."""

    expression: Expression
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class Sent:
    """A region of an array, read by a worker process, on its way in memory that both see."""

    source: Source
    region: Region
    content: Tensor
    dtype: numpy.dtype[Any]

    @classmethod
    def read(cls, source: Source, region: Region) -> Sent:
        array = numpy.ascontiguousarray(source.read(region))
        return cls(source, region, torch.from_numpy(array.reshape(-1).view(numpy.uint8)), array.dtype)

    def array(self) -> numpy.ndarray:
        array = self.content.numpy().view(self.dtype).reshape([len(positions) for positions in self.region])
        array.flags.writeable = False
        return array


@dataclass(frozen=True)
class Draft:
    """A batch made of samples `indices`, with `Unread` leaves, and what has been read for it already."""

    batch: Any
    indices: Sequence[Any]
    parts: Sequence[Sent]
    found: Sequence[tuple[Any, str, Any]] = ()
    """Of statistics that are known, the index of the sample, the digest and the value."""

    def pin_memory(self, device: Any = None) -> Draft:
        return self


class Order(list[Any]):
    """Indices of samples, whether a worker is to read what they are made of, and what is known of their statistics."""

    def __init__(self, indices: Sequence[Any], *, read: bool, known: Mapping[str, Any]) -> None:
        super().__init__(indices)
        self.read, self.known = read, known


Part = Callable[[Source, Region], numpy.ndarray]
