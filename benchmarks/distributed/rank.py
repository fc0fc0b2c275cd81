"""What a rank of `distributed.py` does when it is asked. Over MPI this file is its program:

mpiexec -n RANKS python benchmarks/distributed/rank.py    # rank 0 reads requests, and prints an answer to each
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "demo")]

from brain_volume import peak_tensor_bytes

import distconv
from benchmarks.allocator import keep_freed_memory
from benchmarks.distributed import channels
from benchmarks.distributed.cases import CASES

Step = Callable[[], object]

THREADS, PLAIN_COMPILED, COMPILED = "one process, a thread per rank", "one process, compiled", "compiled"

ALONE = ("one process", THREADS, PLAIN_COMPILED, "slab")
"""Arms that run on rank 0 while the other ranks wait."""

LEAST_ROUNDS, MOST_ROUNDS = 3, 400
SLOW_SECONDS = 30.0
"""A case whose round takes longer than this is measured in one round only."""


class Subject:
    """A case on this rank: the whole and one slab in plain torch, and its share by distconv.

    compiles: whether arms by torch.compile are made where the case has them.
    """

    def __init__(self, name: str, partition: str = "", compiles: bool = True) -> None:
        case, ranks = CASES[name], dist.get_world_size()
        self.mesh = distconv.init(partition or case.partitions[ranks])
        torch.manual_seed(0)
        self.plain = case.build()
        self.model = distconv.parallelize(copy.deepcopy(self.plain), self.mesh)
        self.x = torch.randn(case.shape)
        slab_x = torch.randn(case.slab(ranks))
        with torch.no_grad():
            self.grad = torch.randn_like(self.plain(self.x))
            slab_grad = torch.randn_like(self.plain(slab_x))
        self.shard = distconv.shard(self.x, self.mesh)
        self.shard_grad = distconv.shard(self.grad, self.mesh)
        for x in (self.x, slab_x, self.shard):
            x.requires_grad_(case.input_gradient)
        self.arms: dict[str, Step] = {
            "one process": lambda: _step(self.plain, self.x, self.grad),
            THREADS: lambda: _with_threads(ranks, self.arms["one process"]),
            "slab": lambda: _step(self.plain, slab_x, slab_grad),
            "slabs at once": lambda: _step(self.plain, slab_x, slab_grad),
            "distconv": lambda: _step(self.model, self.shard, self.shard_grad),
        }
        self.models = {"distconv": self.model}
        if case.compiled and compiles:
            whole: Any = torch.compile(copy.deepcopy(self.plain))
            self.arms[PLAIN_COMPILED] = lambda: _step(whole, self.x, self.grad)
            self.models[COMPILED] = self.compiled("inductor")
            self.arms[COMPILED] = lambda: _step(self.models[COMPILED], self.shard, self.shard_grad)

    def compiled(self, backend: str) -> torch.nn.Module:
        """The distributed model by torch.compile, with parameters of its own."""
        model = distconv.parallelize(copy.deepcopy(self.plain), self.mesh)
        compiled: Any = torch.compile(model, backend=backend)
        return compiled

    def error(self) -> float:
        """Largest difference of outputs and gradients from one process's, relative to their largest value."""
        return max(self._error(model) for model in self.models.values())

    def _error(self, model: torch.nn.Module) -> float:
        buffers = copy.deepcopy(self.plain.state_dict())
        pairs = [(distconv.gather(_step(model, self.shard, self.shard_grad)), _step(self.plain, self.x, self.grad))]
        self.plain.load_state_dict(buffers)
        if self.x.requires_grad:
            assert self.shard.grad is not None and self.x.grad is not None
            pairs.append((distconv.gather(self.shard.grad), self.x.grad))
        for a, b in zip(model.parameters(), self.plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            pairs.append((a.grad, b.grad))
        largest = max(float(b.detach().abs().max()) for _, b in pairs)
        return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs) / largest


def _step(model: torch.nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    model.zero_grad()
    x.grad = None
    y: Tensor = model(x)
    y.backward(grad)
    return y


def _with_threads(number: int, step: Step) -> None:
    torch.set_num_threads(number)
    step()
    torch.set_num_threads(1)


def _round(arms: dict[str, Step]) -> dict[str, float]:
    """Seconds of each arm on this rank, which begins it with the others; 0 where it only waits."""
    seconds = {}
    for name, step in arms.items():
        dist.barrier()
        start = time.perf_counter()
        if name not in ALONE or dist.get_rank() == 0:
            step()
        seconds[name] = time.perf_counter() - start
    dist.barrier()
    return seconds


def _of_ranks(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Rank:
    """Answers of all ranks together."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()

    def speed(self, case: str, seconds: float, alone: bool) -> dict[str, Any]:
        """The error, and seconds of every arm in every round, without what runs on one rank if not asked for."""
        subject = Subject(case)
        error = subject.error()
        arms = {name: step for name, step in subject.arms.items() if alone or name not in ALONE}
        _round(arms)  # compiles
        first = _round(arms)
        taken = sum(first.values())
        count = [max(LEAST_ROUNDS, min(MOST_ROUNDS, int(seconds / taken))) if taken < SLOW_SECONDS else 0]
        dist.broadcast_object_list(count)
        rounds = [_round(arms) for _ in range(count[0])] or [first]
        return {"error": error, "seconds": {name: [each[name] for each in rounds] for name in arms}}

    def memory(self, case: str, partition: str) -> dict[str, Any]:
        """Peak tensor bytes of a step: of one process, and of every rank, eager and compiled (aot_eager)."""
        subject = Subject(case, partition, compiles=False)
        compiled = subject.compiled("aot_eager")
        shares = _of_ranks(_peak(subject.model, subject.arms["distconv"]))
        by_graph = _of_ranks(_peak(compiled, lambda: _step(compiled, subject.shard, subject.shard_grad)))
        whole = _peak(subject.plain, subject.arms["one process"]) if dist.get_rank() == 0 else 0
        dist.barrier()
        parameters = sum(parameter.nbytes for parameter in subject.plain.parameters())
        return {"whole": whole, "shares": shares, "compiled": by_graph, "parameters": parameters}

    def traffic(self, case: str) -> list[dict[str, Any]]:
        """{collective: [calls, bytes to send]} of a step on each rank, as Gloo records them."""
        subject = Subject(case, compiles=False)
        return _of_ranks(_recorded(subject.arms["distconv"], subject.x.element_size()))

    def channels(self) -> list[dict[str, Any]]:
        """Bytes that convolutions with sharded channels move, by layer, partition and algorithm, beside formulas."""
        return list(channels.moved(lambda step: sum(sent for _, sent in _recorded(step, 4).values())))


def _peak(model: torch.nn.Module, step: Step) -> int:
    """Of the second step, before which there are no gradients."""
    step()
    model.zero_grad()
    found = peak_tensor_bytes(step, "cpu")
    model.zero_grad()
    return found


def _recorded(step: Step, element_size: int) -> dict[str, list[int]]:
    step()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    found: dict[str, list[int]] = {}
    for event in profile.events():
        if event.name.startswith("gloo:"):  # Gloo's own record of what it is handed to send
            entry = found.setdefault(event.name.removeprefix("gloo:"), [0, 0])
            entry[0] += 1
            entry[1] += sum(map(math.prod, event.input_shapes)) * element_size
    return found


def main() -> None:
    from distconv.mpi import init_process_group

    init_process_group()
    rank = Rank()
    while True:
        request = [json.loads(sys.stdin.readline() or "null") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(request)
        if request[0] is None:
            break
        answer = getattr(rank, request[0].pop("do"))(**request[0])
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
