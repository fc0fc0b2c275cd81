"""One comparison among the ranks: a message of fixed size, and the verdict."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.agreement.disagreement import Disagreement, Note, Site, explain
from distconv.agreement.samples import folded
from distconv.private_names import DIFFERENCES, lacks
from distconv.tensors.mesh import ranks_of, whole_group
from distconv.transfer import group_calls
from distconv.transfer.collectives import gather_into

ANSWER = timedelta(seconds=10)
"""Seconds in which the other ranks may send their notes once one rank has found a disagreement."""

FIELDS = 5


class Comparison:
    """Started when made, among all ranks of a mesh; collective.

    A rank sends five whole numbers, however much it has noted: how many sites, which, and their checksums folded into
    one; for the parameters and buffers whose turn it is, all of one shard, that shard and their checksums folded. Only
    where these do not agree do the ranks exchange their notes, through the job's store: that needs
    no collective, so ranks that have gone different ways cannot wait for each other in vain.
    """

    def __init__(
        self, mesh: DeviceMesh, noted: Sequence[Note[Tensor]], turn: Sequence[Note[Tensor]], serial: int
    ) -> None:
        self._noted, self._serial = [*noted, *turn], serial
        self._mesh = mesh
        device = torch.device(torch.cuda.current_device() if mesh.device_type == "cuda" else "cpu")
        summary = [len(self._noted), _fingerprint(self._noted), turn[0].shard if turn else 0]
        # From memory that is not pinned a copy may wait for the stream.
        numbers = torch.tensor(summary, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
        mine = torch.cat([numbers, *(folded(_together(part, device)).view(1) for part in (noted, turn))])
        self._all = mine.new_empty(mesh.size() * FIELDS)
        self._work = gather_into(self._all, mine, whole_group(mesh))
        self._arrived: Any = None
        if device.type == "cuda":
            self._copy_to_host(mine)

    def _copy_to_host(self, mine: Tensor) -> None:
        """On a stream of its own, so that neither the host nor what is computed meanwhile waits for the others."""
        here = torch.empty(self._all.shape, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(_side_stream(self._all.device)):
            self._work.wait()
            here.copy_(self._all, non_blocking=True)
            # NCCL keeps what it reads alive until the first stream waits for it, which is not the one it was made on.
            for tensor in (mine, self._all):
                tensor.record_stream(torch.cuda.current_stream())
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._all = here

    def arrived(self) -> bool:
        """Whether the verdict can be read without waiting for a device. A host waits for the message itself."""
        return self._arrived is None or self._arrived.query()

    def settle(self) -> None:
        """Waits for the message, if it has not been received.

        Raises the same Disagreement on every rank if they have different tensors.
        """
        if self._arrived is None:
            group_calls.wait(self._work)
        elif not self._arrived.query():  # a whole step later it mostly has
            self._arrived.synchronize()
        rows = self._all.view(-1, FIELDS).tolist()
        if rows.count(rows[0]) < len(rows) and not _agree(rows):
            raise Disagreement(self._explanation())

    def _explanation(self) -> str:
        if line := lacks(DIFFERENCES):
            return f"the ranks have different data: {line}"
        store = dist.distributed_c10d._get_default_store()
        ranks = ranks_of(self._mesh)
        name = f"distconv/agreement/{ranks[0]}-{len(ranks)}/{self._serial}/"
        sums = _together(self._noted, torch.device("cpu")).tolist()
        sites = [(site, each.shard) for each in self._noted for site in each.within or [each.site]]
        mine = [Note(site, value, shard) for (site, shard), value in zip(sites, sums, strict=True)]
        store.set(f"{name}{dist.get_rank()}", json.dumps([asdict(note) for note in mine]))
        try:
            store.wait([f"{name}{rank}" for rank in ranks], ANSWER)
        except RuntimeError:  # torch's store errors: not all of them wrote theirs in time
            return (
                f"the ranks do not have the same, and not all report theirs: rank {dist.get_rank()} has {_shown(mine)}"
            )
        notes = {rank: _notes(store.get(f"{name}{rank}")) for rank in ranks}
        return explain(notes) or "the ranks do not have the same tensors"


def _shown(notes: Sequence[Note[int]]) -> str:
    return "; ".join(dict.fromkeys(str(note.site) for note in notes)) or "nothing"


def _notes(text: bytes) -> list[Note[int]]:
    return [
        Note(Site(**{**each["site"], "shape": tuple(each["site"]["shape"])}), each["checksum"], each["shard"])
        for each in json.loads(text)
    ]


def _agree(rows: Sequence[Sequence[int]]) -> bool:
    """Rows of (sites, which, shard, checksums, checksum of the shard): only ranks with one shard compare the last."""
    first: dict[int, int] = {}
    same = all((row[0], row[1], row[3]) == (rows[0][0], rows[0][1], rows[0][3]) for row in rows)
    return same and all(first.setdefault(row[2], row[4]) == row[4] for row in rows)


def _together(noted: Sequence[Note[Tensor]], device: torch.device) -> Tensor:
    """Their checksums, int64 of shape (n,), as many as there are sites."""
    if not noted:
        return torch.zeros(0, dtype=torch.int64, device=device)
    # Copies to the host must be complete before they are read, so they are not asynchronous.
    return torch.cat([each.checksum.to(device, non_blocking=device.type != "cpu").view(-1) for each in noted])


def _fingerprint(noted: Sequence[Note[Tensor]]) -> int:
    result = 0
    for site in (each.site for each in noted):
        # The path of a script may differ from machine to machine; its line does not.
        text = f"{site.what}|{site.shape}|{site.dtype}|{site.line.rpartition(':')[2]}"
        result = zlib.crc32(text.encode(), result & 0xFFFFFFFF) | (result << 31 & 0x3FFFFFFF00000000)
    return result


@functools.lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
