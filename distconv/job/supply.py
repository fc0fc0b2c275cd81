"""With `--store`: supplies the parts of each batch from memory, from other ranks that keep them, or from files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from distconv.job.sample_statistics import SlabExchange, begun_in_thread
from distconv.reading.share import Share
from distconv.reading.store import Key, PartStore, Sample, sample
from distconv.settings import StoreOption
from distconv.tensors.gathering.memory import free_on_host
from mucudnn.process import print_line

GIB = 1 << 30

DEFAULT_SHARE = 0.5
"""The share of the memory free at the job's start that all ranks of a machine keep together where no limit is given."""


@dataclass(frozen=True)
class Cut:
    """A batch before it was cut."""

    count: int  # The number of its samples.
    indices: str  # The indices of its samples, as text.
    samples: tuple[tuple[Sample, ...], ...] = ()  # The samples of each coordinate on the axis of samples.
    of_epoch: int = 0  # About how many samples an epoch has.


class Supply:
    """A store on every rank, and the owner of each sample: the rank that was the first to make it. All ranks see the
    indices of whole batches, so that each knows the owners without a message."""

    def __init__(self, mesh: DeviceMesh, share: Share, option: StoreOption) -> None:
        self._share, self._option = share, option
        self._limit_of = f"memory={option.gib:g}" if option.gib is not None else "memory"
        self.store = PartStore(
            int(option.gib * GIB) if option.gib is not None else int(DEFAULT_SHARE * free_on_host(mesh))
        )
        self._exchange = SlabExchange.along_samples(mesh)
        self._owners: dict[Sample, int] = {}
        self._begun: set[int] = set()
        self._ready: Cut | None = None
        self._ahead: tuple[Cut, Future[list[tuple[Key, Any]]]] | None = None
        self._reported: set[str] = set()

    def cut(self, number: int, batch: Sequence[Any], of_epoch: int) -> Cut:
        samples = tuple(
            tuple(sample(number, index) for index in self._share.portion(batch, coordinate))
            for coordinate in range(self._exchange.size)
        )
        return Cut(len(batch), str(list(batch)), samples, of_epoch)

    def is_known(self, cut: Cut) -> bool:
        """Whether all samples that this rank makes of the batch have been made before."""
        return all(sample in self._owners for sample in cut.samples[self._share.of_samples])

    def moves(self, cut: Cut) -> bool:
        """Whether a rank makes a sample that another one owns: the same answer on every rank with these samples."""
        return any(
            self._owners.get(sample, coordinate) != coordinate
            for coordinate, samples in enumerate(cut.samples)
            for sample in samples
        )

    def is_ready(self, cut: Cut) -> bool:
        """Whether `ready` needs no other rank that has not agreed to the batch."""
        return cut is self._ready or (self._ahead is not None and self._ahead[0] is cut) or not self.moves(cut)

    def ready(self, cut: Cut) -> None:
        """Receives what the batch needs from others, if it was not received ahead. Collective where samples move."""
        if cut is self._ready:
            return
        self._ready = cut
        self.store.drop_batch()
        ahead, self._ahead = self._ahead, None
        received = ahead[1].result() if ahead is not None else []
        if ahead is None or ahead[0] is not cut:
            received = self._receive(cut)
        self.store.add(received)

    def go_ahead(self, cut: Cut) -> None:
        """Starts to receive the parts of the next batch, to which the ranks have agreed already."""
        self.close()
        if self.moves(cut):
            self._ahead = cut, begun_in_thread(lambda: self._receive(cut))

    def _receive(self, cut: Cut) -> list[tuple[Key, Any]]:
        if not self.moves(cut):
            return []
        mine = self._share.of_samples
        return self._exchange(
            [
                self.store.parts_of(each for each in samples if coordinate != mine and self._owners.get(each) == mine)
                for coordinate, samples in enumerate(cut.samples)
            ]
        )

    def refusal(self, number: int, cut: Cut) -> str:
        """Why the samples of a data set cannot be kept, asked when its first batch has been made; "" where they can.

        A data set that is first used when others are kept already is read from files, as far as it does not fit.
        """
        if number in self._begun:
            return ""
        self._begun.add(number)
        own = cut.samples[self._share.of_samples]
        here, source = self.store.asked()
        if source is None:
            self._report("this data set: it reads no arrays of HDF5, Zarr or memory maps in parts", "keeps nothing of")
            return ""
        needed = here / len(set(own)) * max(cut.of_epoch, cut.count) * len(own) / cut.count
        if self.store.bytes + needed <= self.store.limit:
            return ""
        left = max(self.store.limit - self.store.bytes, 0)
        what = f"the parts of about {max(cut.of_epoch, cut.count)} samples that a rank reads, such as of {source}"
        if self._option.disk or len(self._begun) > 1:
            self._report(f"{left / needed:.0%} of {what}; the rest is read from files in every epoch")
            return ""
        return (
            f"--store {self._limit_of}: {what}, take {_gib(self.store.bytes + needed)} GiB, of which a rank may keep "
            f"{_gib(self.store.limit)}; accepted: memory=GIB with more, or memory+disk"
        )

    def end(self, cut: Cut) -> None:
        """Keeps what this rank owns of the batch that has been made."""
        for coordinate, samples in enumerate(cut.samples):
            for each in samples:
                self._owners.setdefault(each, coordinate)
        mine = self._share.of_samples
        self.store.end_batch({each for each in cut.samples[mine] if self._owners[each] == mine})

    def close(self) -> None:
        """Waits for messages that are on their way."""
        if self._ahead is not None:
            self._ahead[1].result()
            self._ahead = None

    def _report(self, what: str, verb: str = "keeps") -> None:
        line = f"distconv: --store {verb} {what}"
        if line not in self._reported:
            self._reported.add(line)
            print_line(line)


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"
