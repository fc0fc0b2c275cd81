"""Checks that all ranks read the same batches, and raises an error of one rank on all of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distconv.agreement.disagreement import Disagreement
from distconv.reading.fault import ReadError
from distconv.settings import value
from distconv.tensors.process_groups import new_group
from distconv.transfer import group_calls
from distconv.transfer.collectives import gather_into

BATCH, END, FAULT = range(3)


@dataclass(frozen=True)
class Batch:
    """The state of a rank's loader: a batch, the end of an epoch, or data that it cannot read."""

    kind: int  # BATCH, END or FAULT.
    indices: str = ""  # The indices of the samples of the whole batch, as text.
    shapes: str = ""  # The shapes of the batch's tensors without the samples' dim, as text.
    sources: int = 0  # A checksum of the files from which the rank's samples are made.
    of_samples: int = 0  # The rank's coordinate on the axis of samples: ranks that share it read the same files.
    fault: str = ""  # The line that says what cannot be read.
    is_open: bool = False
    """Whether statistics of the rank's samples have to be found before the batch can be given out."""

    def numbers(self) -> list[int]:
        texts = [zlib.crc32(text.encode()) for text in (self.indices, self.shapes)]
        return [self.kind, *texts, self.of_samples, self.sources, self.is_open]


class Agreement:
    """The comparison of batches among all ranks of a mesh: 48 bytes a rank and batch, on the host."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = mesh.mesh.flatten().tolist()
        host = "gloo" if dist.get_backend() == "nccl" else None
        self._group = new_group(self._ranks, backend=host) if len(self._ranks) > 1 else None

    def __call__(self, batch: Batch) -> bool:
        """Whether any rank's batch is open. Collective. ReadError where a rank cannot read, and Disagreement where one
        has another batch, with the same line on every rank."""
        if self._group is None:
            if batch.kind == FAULT:
                raise ReadError(batch.fault)
            return batch.is_open
        own = torch.tensor(batch.numbers(), dtype=torch.int64, device="cpu")
        gathered = own.new_empty(len(self._ranks) * own.numel())
        group_calls.wait(gather_into(gathered, own, self._group))
        rows = gathered.view(len(self._ranks), -1).tolist()
        faults = [rank for rank, row in zip(self._ranks, rows, strict=True) if row[0] == FAULT]
        if faults:
            raise ReadError(self._texts(batch.fault)[faults[0]])
        if value("check") == "off" and all(row[0] == rows[0][0] for row in rows):
            return any(row[5] for row in rows)
        for column, what, text in (
            (0, "", ""),
            (1, "the indices of a batch", batch.indices),
            (2, "shapes", batch.shapes),
        ):
            others = [rank for rank, row in zip(self._ranks, rows, strict=True) if row[column] != rows[0][column]]
            if others:
                raise Disagreement(
                    _line(what or "the number of batches", self._texts(text or str(batch)), self._ranks[0], others[0])
                )
        first: dict[int, tuple[int, int]] = {}
        for rank, row in zip(self._ranks, rows, strict=True):
            other, sources = first.setdefault(row[3], (rank, row[4]))
            if sources != row[4]:
                raise Disagreement(
                    f"the files, or their parts, that the samples {batch.indices} are made of are not the same on "
                    f"ranks {other} and {rank}, which share these samples"
                )
        return any(row[5] for row in rows)

    def _texts(self, own: str) -> dict[int, str]:
        """The texts of all ranks, by rank. Collective."""
        gathered: list[str] = [""] * len(self._ranks)
        dist.all_gather_object(gathered, own, group=self._group)
        return dict(zip(self._ranks, gathered, strict=True))


def _line(what: str, texts: dict[int, str], one: int, other: int) -> str:
    differing = ", ".join(f"rank {rank} has {_short(texts[rank])}" for rank in (one, other))
    return f"{what} is not the same on every rank: {differing}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
