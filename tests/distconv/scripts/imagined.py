"""Records steps in an imagined job of four ranks, and prints as JSON what a test compares with a real one."""

from __future__ import annotations

import json

import small_network
import torch.distributed as dist

from distconv import settings
from distconv.model import fully_sharded
from distconv.performance.candidates import partitions
from distconv.performance.choice import PartitionPlanner
from distconv.performance.costs import moved_bytes
from distconv.performance.events import Kernel, Start
from distconv.performance.layers import trace
from distconv.performance.machine import read_machine
from distconv.performance.recording import on_meta, record_step
from distconv.performance.without_data import imagined_job, mesh_of
from distconv.settings.partition import Partition
from distconv.tensors.mesh import placements
from distconv.transfer.redistribution import redistribution
from mucudnn.optimizer import DoesNotFit

model = on_meta(small_network.Small)
found: dict[str, object] = {}
with imagined_job(4) as rank:
    found["rank"] = rank
    fully_sharded.LEAST_BYTES = 0
    for text, fully in small_network.STEPS:
        with settings.options({"shard_parameters": fully}):
            step = record_step(model, mesh_of(Partition.parse(text)), small_network.SHAPE)
        found[f"{text}, {fully}"] = [[e.kind, e.bytes, list(e.ranks)] for e in step.events if isinstance(e, Start)]
        found[f"bytes under {text}, {fully}"] = step.parameters
        assert any(isinstance(event, Kernel) and event.flops for event in step.events)

    every = partitions(4, 4)
    meshes = [mesh_of(partition) for partition in every]
    shape = (4, 8, 12, 10)
    sizes, _ = moved_bytes(shape, meshes)
    found["moves"] = [
        [
            sizes[a, b],
            4 * sum(redistribution(old, placements(old, 4), new, placements(new, 4), shape).route.received),
        ]
        for a, old in enumerate(meshes)
        for b, new in enumerate(meshes)
    ]

    graph = trace(model, small_network.SHAPE)
    planner = PartitionPlanner(model, graph, every, read_machine("lassen"))
    best = planner.best()
    found["best"] = [best.seconds, best.memory(1.0)]
    found["single"] = [plan.seconds for plan in planner.uniform()]
    found["rows"] = [[row.name, str(row.partition), row.price] for row in planner.rows(best)]
    limited = []
    for share in (1.0, 0.8, 0.6):
        try:
            plan = planner.best(share * best.memory(1.0))
            limited.append([plan.seconds, plan.memory(1.0), share * best.memory(1.0)])
        except DoesNotFit as error:
            limited.append([None, error.least, share * best.memory(1.0)])
    found["limited"] = limited
assert not dist.is_initialized()
print(json.dumps(found))
