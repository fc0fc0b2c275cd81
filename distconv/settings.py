"""What is chosen for each mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

batch_norm_statistics: dict[DeviceMesh, str] = {}
"""Per mesh in use: batch norm's statistics are over the "global" batch, or over each rank's "local" share."""


channel_algorithms: dict[DeviceMesh | None, str] = {None: "auto"}
"""Per mesh, and for all others: which of distconv.channels.ALGORITHMS shards the weights of its layers."""


def channel_algorithm(mesh: DeviceMesh) -> str:
    """The algorithm of a mesh."""
    return channel_algorithms.get(mesh, channel_algorithms[None])
