"""How long reading delays a training step, on a machine with a file system of a given bandwidth. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.performance.machine import Machine

GB = 1e9


@dataclass(frozen=True)
class Job:
    """The reading of a step.

    Attributes:
        ranks: of the job.
        groups: into which the samples of a batch are divided: the ranks on the axis of samples.
        samples: of a batch.
        sample_bytes: of one sample in its file.
    """

    ranks: int
    groups: int
    samples: int
    sample_bytes: float

    @property
    def share(self) -> float:
        """Bytes of a batch that a rank needs: a slab of each of its group's samples."""
        return self.samples * self.sample_bytes / self.ranks


def file_seconds(job: Job, machine: Machine, bandwidth: float, *, parts: bool) -> float:
    """Seconds in which the file system gives all ranks a batch.

    The file system's bandwidth is shared by all ranks, and a node's adapter by the ranks of the node. No cache is
    counted on, as data sets of this kind are larger than the memory of file servers.

    Args:
        bandwidth: of the file system, bytes per second.
        parts: whether each rank reads its slabs; else every rank of a group reads whole samples.
    """
    of_a_rank = job.share if parts else job.samples * job.sample_bytes / job.groups
    return max(job.ranks * of_a_rank / bandwidth, machine.node.ranks * of_a_rank / machine.network.bandwidth)


def store_seconds(job: Job, machine: Machine) -> float:
    """Seconds of the exchange that brings a rank what others keep of a batch, samples being drawn at random.

    A sample was kept by the group that is to make it once in `groups` times; a slab comes from one other rank.
    """
    moved = job.share * (1 - 1 / job.groups)
    messages = min(job.samples / job.groups, job.groups - 1)
    return messages * machine.network.latency + machine.node.ranks * moved / machine.network.bandwidth


def step_seconds(compute: float, reading: float) -> float:
    """Of a step whose next batch is read while it computes."""
    return max(compute, reading)
