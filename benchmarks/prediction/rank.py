"""One rank of a job that takes a network's training steps when it is asked to: rank.py RANK RANKS STORE.

The first rank reads requests from its input, one JSON object a line, and answers with one a line:

    {"do": "prepare", "case": name, "strategy": {pattern: partition}}    makes the network, and takes some steps
    {"do": "steps", "count": n}                                          seconds of n steps, of the slowest rank each
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distconv
from benchmarks.prediction.cases import EVERY
from distconv.model.strategy import Strategy

WARM = 2

Take = Callable[[], None]


def prepared(name: str, strategy: Mapping[str, str]) -> Take:
    """What takes one step of a network: forward and backward."""
    case = EVERY[name]
    torch.manual_seed(0)
    layers = Strategy.parse(strategy)
    mesh = distconv.init(str(layers.layers[-1][1]))
    model = distconv.parallelize(case.build(), mesh, None if layers.is_one_partition else layers)
    x = distconv.shard(torch.randn(case.shape), mesh)

    def take() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(WARM):
        take()
    return take


def seconds(take: Take) -> float:
    dist.barrier()
    start = time.perf_counter()
    take()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main(rank: str, ranks: str, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, int(ranks)), rank=int(rank), world_size=int(ranks))
    take: Take | None = None
    while True:
        request: list[Any] = [sys.stdin.readline() if rank == "0" else None]
        dist.broadcast_object_list(request, 0)
        if not request[0]:
            return
        told = json.loads(request[0])
        answer: list[float] = []
        if told["do"] == "prepare":
            take = None  # the memory of the last network
            take = prepared(told["case"], told["strategy"])
        else:
            assert take is not None
            answer = [seconds(take) for _ in range(told["count"])]
        if rank == "0":
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
