"""The costs of a layer under a partition, and of the change from one partition to another, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.homes import BUCKET_BYTES
from distconv.performance.events import Kernel, RecordedStep, Start, Wait
from distconv.performance.layers import Layer
from distconv.performance.machine import Machine
from distconv.performance.replay import message_seconds, replay
from distconv.tensors.layouts import box_at
from distconv.tensors.mesh import placements

Numbers = npt.NDArray[np.float64]

ITEMSIZE = 4  # Bytes of an element of an activation.

PASSES = {0.0: 3, 1.0: 8, 2.0: 18}
"""How often the bytes of a rank's parameters pass through memory in an optimizer's update, by how many numbers it keeps
for each parameter. Torch's optimizers run a kernel for each operation, unless they are fused: SGD one that reads the
parameter and its gradient and writes the parameter; momentum two more on the momentum; Adam seven: lerp and addcdiv,
the mul, addcmul and sqrt of squares, and div and add, which have 3, 4, 2, 3, 2, 2 and 2 operands."""


@dataclass(frozen=True)
class Cost:
    """One layer under one partition, on one rank and for one step.

    Attributes:
        compute: seconds of kernels and of the host, and of the optimizer's update.
        exchange: seconds in which the rank waits for halos, channels and statistics.
        gradients: seconds of the allreduces of its parameters' gradients, which mostly hide behind other layers.
        memory: bytes of what forward keeps of its own, its input left out.
        parameters: bytes of parameters.
        refusal: why it cannot run so; "" where it can.
        hidden: seconds of messages for halos, channels and statistics behind which the rank computes; of no other part.
        algorithm: the channel algorithm by which it is that; None for the job's.
    """

    compute: float
    exchange: float
    gradients: float
    memory: float
    parameters: float
    refusal: str = ""
    hidden: float = 0.0
    algorithm: str | None = None

    def seconds(self, exposed: float = 0.0) -> float:
        """All of it, with a share of the gradients' allreduces that does not hide."""
        return self.compute + self.exchange + exposed * self.gradients

    def bytes(self, states: float) -> float:
        """With a gradient and ``states`` further numbers for each parameter, as the optimizer keeps them."""
        return self.memory + (2 + states) * self.parameters


NEVER = Cost(math.inf, 0.0, 0.0, 0.0, 0.0)


def update_seconds(step: RecordedStep, machine: Machine, states: float) -> float:
    """Seconds of a step of an optimizer that keeps ``states`` numbers per parameter. Its kernels do little arithmetic.

    On a processor torch takes one parameter after another, and the host an operator's time for each; on a GPU, all at
    once.
    """
    moving = PASSES[states] * step.parameters / machine.device.bandwidth
    return moving if machine.host.asynchronous else moving + step.tensors * machine.host.operator


def layer_cost(
    recorded: RecordedStep | str | None, layer: Layer, mesh: DeviceMesh, machine: Machine, states: float | None = None
) -> Cost:
    """The costs of a layer on a mesh.

    Args:
        recorded: its step, recorded alone; the reason where it cannot run so; None for a join that nothing follows.
        states: numbers per parameter that the optimizer keeps; None where neither backward nor an update follows.
    """
    trains = states is not None
    joins = (1 + trains) * _join_seconds(layer, mesh, machine) if layer.is_join else 0.0
    if recorded is None:
        return Cost(joins, 0.0, 0.0, 0.0, 0.0)
    if isinstance(recorded, str):
        return replace(NEVER, refusal=recorded)
    alone, gradients = without(recorded, "gradients")
    times = replay(alone, machine)
    update = 0.0 if states is None else update_seconds(recorded, machine, states)
    per_byte = [
        message_seconds(machine, replace(start, bytes=BUCKET_BYTES), recorded.rank) / BUCKET_BYTES
        for start in gradients
    ]
    return Cost(
        compute=joins + times.total - times.exposed + update,
        exchange=times.exposed,
        gradients=math.fsum(seconds * start.bytes for seconds, start in zip(per_byte, gradients, strict=True)),
        memory=max(0.0, recorded.saved - local_bytes(layer.output if layer.is_join else layer.input, mesh)),
        parameters=recorded.parameters,
        hidden=times.hidden,
    )


def without(step: RecordedStep, kind: str) -> tuple[RecordedStep, list[Start]]:
    """A step without the collectives of a kind, and those."""
    found = [event for event in step.events if isinstance(event, Start) and event.kind == kind]
    numbers = {start.number for start in found}
    left = [e for e in step.events if not (isinstance(e, Start | Wait) and e.number in numbers)]
    return replace(step, events=tuple(left)), found


def _join_seconds(layer: Layer, mesh: DeviceMesh, machine: Machine) -> float:
    """Seconds: forward reads all inputs and writes the output; backward, of their gradients, takes as long."""
    size = local_bytes(layer.output, mesh)
    one = machine.kernel_seconds(Kernel("join", 0, int(size * (layer.inputs + 1))))
    return max(one, machine.host.operator) if machine.host.asynchronous else one + machine.host.operator


def local_bytes(shape: Sequence[int], mesh: DeviceMesh) -> float:
    """The bytes of this rank's shard of an activation."""
    return ITEMSIZE * float(np.prod([stop - start for start, stop in _box(shape, mesh)]))


def _box(shape: Sequence[int], mesh: DeviceMesh) -> list[tuple[int, int]]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the rank of an imagined job is on every mesh"
    return list(box_at(mesh, placements(mesh, len(shape)), shape, coordinate))


def moved_bytes(shape: Sequence[int], meshes: Sequence[DeviceMesh]) -> tuple[Numbers, Numbers]:
    """Bytes that this rank receives if an activation goes from one mesh to another, for all pairs of meshes.

    It receives what it needs of the new layout and does not own under the old one, as the redistribution's plan has it.

    Returns:
        Bytes, and the number of ranks that send them, each as a matrix (from, to).
    """
    boxes = np.array([_box(shape, mesh) for mesh in meshes], dtype=np.float64)  # (mesh, dim, 2)
    old, new = boxes[:, None], boxes[None, :]
    common = np.clip(np.minimum(old[..., 1], new[..., 1]) - np.maximum(old[..., 0], new[..., 0]), 0, None)
    needed = np.broadcast_to(new[..., 1] - new[..., 0], common.shape)
    missing = needed.prod(axis=-1) - common.prod(axis=-1)
    # The number of shards of the old layout that the new box meets, dim by dim, if all are as large as this rank's.
    size = np.maximum(old[..., 1] - old[..., 0], 1)
    shards = np.ceil(new[..., 1] / size) - np.floor(new[..., 0] / size)
    sources = np.maximum(shards, 1).prod(axis=-1) - (common.prod(axis=-1) > 0)
    return ITEMSIZE * missing, np.where(missing > 0, np.maximum(sources, 1), 0)


def move_seconds(
    shape: Sequence[int], meshes: Sequence[DeviceMesh], machine: Machine, both_ways: bool = True
) -> Numbers:
    """Seconds to redistribute an activation from one mesh to another, and its gradient back, by pair: (from, to)."""
    sizes, sources = moved_bytes(shape, meshes)
    ranks = meshes[0].size()
    node, network = machine.node, machine.network
    share = min(1.0, (node.ranks - 1) / max(1, ranks - 1))  # of the other ranks, those on the same node
    latency = share * node.latency + (1 - share) * network.latency
    # Sent at once over both ways; all ranks of the job send equal parts.
    busiest = np.maximum(share * sizes / node.bandwidth, (1 - share) * sizes * node.ranks / network.bandwidth)
    host = machine.host.operator + machine.host.message
    copies = np.where(sizes > 0, 3 * machine.device.kernel + host + 4 * sizes / machine.device.bandwidth, 0)
    one_way = sources * latency + busiest + copies
    return one_way + one_way.T if both_ways else one_way
