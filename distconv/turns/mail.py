"""Mail: tensors that parts of one rank send to parts of other ranks, exchanged when no part of any rank can go on.

Every exchange is two collectives of all ranks. So the order in which parts of different ranks join their collectives
does not matter, and the same parts get the same letters in every run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from distconv.tensors.mesh import whole_group
from distconv.transfer.collectives import all_gathered
from distconv.transfer.route import AllToAll

ALIGNED = 16  # Tensors begin at multiples of so many bytes.

_ENDS_ALL = "_distconv_ends_all_ranks"


class MailState(IntEnum):
    """The state of a rank's parts at an exchange: all have ended, some wait for others, or one has failed."""

    ENDED, WAITING, FAILED = range(3)


class Letter(NamedTuple):
    """Tensors, and a description of them made of numbers, words, and lists of these."""

    about: list[Any]
    tensors: list[Tensor]


@dataclass(frozen=True)
class Delivery:
    """The letters and states that a rank gets in an exchange."""

    letters: list[Letter]  # The letters to this rank, in the order of the sending ranks.
    have_ended: bool  # Whether the parts of all ranks have.
    is_silent: bool  # Whether no rank has sent anything.
    failure: BaseException | None  # The error of the first rank that failed.


class Mail:
    """The letters that this rank sends and receives. ``mesh``: all ranks of the job."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks, self.rank = mesh.size(), dist.get_rank()
        self._group = whole_group(mesh)
        self._device = torch.device("cpu" if mesh.device_type == "cpu" else torch.cuda.current_device())
        self.clear()

    def clear(self) -> None:
        """Drops all letters that were to be sent."""
        self._letters: list[list[Letter]] = [[] for _ in range(self.ranks)]

    def send(self, to: int, about: list[Any], tensors: Sequence[Tensor]) -> None:
        """Copies tensors, to be sent to rank ``to`` in the next exchange."""
        copies = []
        for x in tensors:
            with _disable_current_modes():  # else the copy could leave the device before it is sent
                copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            copies.append(copy.copy_(x))
        self._letters[to].append(Letter(about, copies))

    def exchange(self, state: MailState, failure: BaseException | None = None) -> Delivery:
        """All ranks send each other their letters. Collective. ``failure``: the error of a part here, for all ranks."""
        with torch.inference_mode(), _disable_current_modes():
            description = None if failure is None else _described(failure)
            texts = [_text(letters, description) for letters in self._letters]
            pieces = [_pieces(text, letters, self._device) for text, letters in zip(texts, self._letters, strict=True)]
            self.clear()
            sizes = [sum(piece.numel() for piece in of_rank) for of_rank in pieces]
            row = torch.tensor([state, *map(len, texts), *sizes], device=self._device)
            rows = all_gathered(row, self.ranks, self._group).view(self.ranks, -1).tolist()
            is_silent = not any(any(row[1:]) for row in rows)
            received = [row[1 + self.ranks + self.rank] for row in rows]
            output = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
            if not is_silent:
                flat = torch.cat(list(itertools.chain.from_iterable(pieces)))
                del pieces
                output = AllToAll(output, flat, received, sizes, self._group).wait()
            letters, failures = [], {}
            for rank, body in enumerate(output.split(received)):
                found, description = _read(body, rows[rank][1 + self.rank])
                letters += found
                if description is not None:
                    failures[rank] = description
        first = self._first(failures, failure)
        if first is not None:
            setattr(first, _ENDS_ALL, True)
        return Delivery(letters, all(row[0] == MailState.ENDED for row in rows), is_silent, first)

    def _first(self, failures: dict[int, list[Any]], own: BaseException | None) -> BaseException | None:
        """The error of the first rank that failed: the error itself on that rank, elsewhere one of its class."""
        if not failures:
            return None
        first = min(failures)
        module, name, args, text = failures[first]
        if own is not None and (first == self.rank or failures.get(self.rank) == failures[first]):
            return own
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # it may take other arguments
                return kind(*args)
        return RuntimeError(f"rank {first} failed with {name}: {text}")


def ends_all_ranks(error: BaseException) -> bool:
    """Whether every rank has got the error, or its cause, in one and the same exchange."""
    return any(getattr(each, _ENDS_ALL, False) for each in (error, error.__cause__))


def _described(error: BaseException) -> list[Any]:
    """An error for other ranks: its class, its arguments, and its text."""
    args = [arg if isinstance(arg, str | int | float) else str(arg) for arg in error.args]
    return [type(error).__module__, type(error).__qualname__, args, str(error)]


def _text(letters: Sequence[Letter], failure: list[Any] | None) -> bytes:
    """The descriptions of the letters to one rank, and a failure, as text; empty where there are none."""
    if not letters and failure is None:
        return b""
    kinds = [[[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in letter.tensors] for letter in letters]
    text = json.dumps([[[letter.about for letter in letters], kinds], failure]).encode()
    return text + b" " * (-len(text) % ALIGNED)


def _pieces(text: bytes, letters: Sequence[Letter], device: torch.device) -> list[Tensor]:
    """The bytes of a text and of the tensors behind it, each aligned for every dtype."""
    first = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    pieces = [first.to(device)]
    for x in (x for letter in letters for x in letter.tensors if x.numel()):
        pieces += [x.reshape(-1).view(torch.uint8).to(device), first.new_zeros(-x.nbytes % ALIGNED, device=device)]
    return pieces


def _read(body: Tensor, text_bytes: int) -> tuple[list[Letter], list[Any] | None]:
    """The letters from one rank, and the description of its error. ``body`` begins with so many bytes of text."""
    if not text_bytes:
        return [], None
    (abouts, kinds), failure = json.loads(body[:text_bytes].cpu().numpy().tobytes())
    letters, at = [], text_bytes
    for about, of_letter in zip(abouts, kinds, strict=True):
        tensors = []
        for name, shape in of_letter:
            dtype = getattr(torch, name)
            size = math.prod(shape) * dtype.itemsize
            tensors.append(body[at : at + size].view(dtype).view(shape))
            at += size + -size % ALIGNED
        letters.append(Letter(about, tensors))
    return letters, failure
