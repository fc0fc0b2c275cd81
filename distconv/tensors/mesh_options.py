"""Options of a mesh: how batch norm computes its statistics, and which algorithm splits channels."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from distconv import settings

batch_norm_statistics: dict[DeviceMesh, str] = {}
"""Per mesh in use: batch norm's statistics are over the "global" batch, or over each rank's "local" share."""


channel_algorithms: dict[DeviceMesh, str] = {}
"""Per mesh: which of distconv.settings.channels.ALGORITHMS shards the weights of its layers."""


uncompared: set[DeviceMesh] = set()  # The meshes of parts in turn, which are compared elsewhere.


def is_compared(mesh: DeviceMesh) -> bool:
    """Whether checksums of what must be the same on the ranks of a mesh are compared."""
    return mesh.size() > 1 and mesh not in uncompared and settings.value("check") == "on"


def channel_algorithm(mesh: DeviceMesh) -> str:
    """The algorithm of a mesh: the one it was given, else, from its first use on, what the job's setting says then."""
    if mesh not in channel_algorithms:
        channel_algorithms[mesh] = settings.value("channel_algorithm")
    return channel_algorithms[mesh]
