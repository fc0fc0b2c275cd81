"""One rank of `distributed.py`: rank 0 reads requests, a JSON object per line, and prints an answer to each.

python benchmarks/distributed/rank.py gloo RANK RANKS STORE
mpiexec -n RANKS python benchmarks/distributed/rank.py mpi
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "demo")]

from brain_volume import peak_tensor_bytes

import distconv
from benchmarks.allocator import keep_freed_memory
from benchmarks.distributed import channels
from benchmarks.distributed.cases import CASES
from benchmarks.distributed.wide import wide

Step = Callable[[], object]

THREADS, PLAIN_COMPILED, COMPILED = "one process, a thread per rank", "one process, compiled", "compiled"

ALONE = ("one process", THREADS, PLAIN_COMPILED, "slab", "share")
"""Arms that run on rank 0 while the other ranks wait."""


class Subject:
    """A case on this rank: the whole and one slab in plain torch, and its share by distconv.

    compiles: whether arms by torch.compile are made where the case has them.
    """

    def __init__(self, name: str, partition: str, compiles: bool = True) -> None:
        case, ranks = CASES[name], dist.get_world_size()
        self.mesh = _mesh(partition)
        torch.manual_seed(0)
        self.plain = case.build()
        self.model = distconv.parallelize(copy.deepcopy(self.plain), self.mesh)
        self.x = torch.randn(case.shape)
        self.slab_x = torch.randn(case.slab(ranks))
        with torch.no_grad():
            self.grad = torch.randn_like(self.plain(self.x))
            self.slab_grad = torch.randn_like(self.plain(self.slab_x))
        self.shard = distconv.shard(self.x, self.mesh)
        self.shard_grad = distconv.shard(self.grad, self.mesh)
        for x in (self.x, self.slab_x, self.shard):
            x.requires_grad_(case.input_gradient)
        self.arms: dict[str, Step] = {
            "one process": lambda: _step(self.plain, self.x, self.grad),
            THREADS: lambda: _with_threads(ranks, lambda: _step(self.plain, self.x, self.grad)),
            "slab": lambda: _step(self.plain, self.slab_x, self.slab_grad),
            "slabs at once": lambda: _step(self.plain, self.slab_x, self.slab_grad),
            "distconv": lambda: _step(self.model, self.shard, self.shard_grad),
        }
        self.models = {"distconv": self.model}
        if case.compiled and compiles:
            whole: Any = torch.compile(copy.deepcopy(self.plain))
            self.arms[PLAIN_COMPILED] = lambda: _step(whole, self.x, self.grad)
            self.models[COMPILED] = self.compiled("inductor")
            self.arms[COMPILED] = lambda: _step(self.models[COMPILED], self.shard, self.shard_grad)
            self.arms[COMPILED]()
            if dist.get_rank() == 0:
                self.arms[PLAIN_COMPILED]()

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
        pairs = [(distconv.gather(_step(model, self.shard, self.shard_grad)), _step(*self.whole()))]
        self.plain.load_state_dict(buffers)
        if self.x.requires_grad:
            assert self.shard.grad is not None
            pairs.append((distconv.gather(self.shard.grad), self.x.grad))
        pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), self.plain.parameters(), strict=True)]
        largest = max(float(b.detach().abs().max()) for _, b in pairs)
        return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs) / largest

    def whole(self) -> tuple[torch.nn.Module, Tensor, Tensor]:
        return self.plain, self.x, self.grad


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


_meshes: dict[str, DeviceMesh] = {}
_subjects: dict[tuple[str, str], Subject] = {}


def _mesh(partition: str) -> DeviceMesh:
    if partition not in _meshes:
        _meshes[partition] = distconv.init(partition)
    return _meshes[partition]


def _subject(name: str, partition: str = "", compiles: bool = True) -> Subject:
    key = name, partition or CASES[name].partitions[dist.get_world_size()]
    if key not in _subjects:
        _subjects.clear()
        made = Subject(*key, compiles=compiles)
        if not compiles:
            return made
        _subjects[key] = made
    return _subjects[key]


def error(case: str) -> float:
    """How far distconv is from one process."""
    return _subject(case).error()


def _timed(step: Step, alone: bool) -> float:
    dist.barrier()
    if alone and dist.get_rank() != 0:
        return 0.0
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _rounds(arms: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, step in arms.items():
            seconds[name].append(_timed(step, name in ALONE))
    dist.barrier()
    return seconds


def speed(case: str, rounds: int, alone: bool) -> dict[str, list[float]]:
    """Seconds of every arm, in turn."""
    arms = _subject(case).arms
    return _rounds({name: step for name, step in arms.items() if alone or name not in ALONE}, rounds)


def fixed(case: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of one distributed convolution and of the collectives that it consists of, in turn."""
    subject, ranks, rank = _subject(case), dist.get_world_size(), dist.get_rank()
    layer, mesh = subject.plain, subject.mesh
    assert isinstance(layer, torch.nn.Conv2d)
    replicated = [Replicate()] * mesh.ndim
    weights = [
        DTensor.from_local(parameter.detach(), mesh, replicated, run_check=False).requires_grad_()
        for parameter in (layer.weight, layer.bias)
        if parameter is not None
    ]
    leaves = (subject.shard, *weights)

    def convolution() -> object:
        y = F.conv2d(leaves[0], leaves[1], leaves[2], padding=layer.padding)
        return torch.autograd.grad(y, leaves, subject.shard_grad)

    row = subject.x.shape[1] * subject.x.shape[3]
    neighbours = [row if abs(peer - rank) == 1 else 0 for peer in range(ranks)]
    out, received = torch.zeros(sum(neighbours)), torch.empty(sum(neighbours))
    gradients = torch.zeros(sum(parameter.numel() for parameter in layer.parameters()))
    arms: dict[str, Step] = {
        "slab": subject.arms["slab"],
        "slabs at once": subject.arms["slabs at once"],
        "convolution": convolution,
        "training step": subject.arms["distconv"],
        "all_to_all_single of the halo": lambda: dist.all_to_all_single(received, out, neighbours, neighbours),
        "allreduce of the gradients": lambda: dist.all_reduce(gradients),
    }
    return _rounds(arms, rounds)


def memory(case: str, partition: str) -> dict[str, Any]:
    """Peak tensor bytes of a step: of one process, and of every rank, eager and compiled (aot_eager)."""
    subject = _subject(case, partition)
    compiled = subject.compiled("aot_eager")
    shares = _peaks(subject.model, subject.arms["distconv"])
    by_graph = _peaks(compiled, lambda: _step(compiled, subject.shard, subject.shard_grad))
    whole = 0
    if dist.get_rank() == 0:
        whole = _peak(subject.plain, subject.arms["one process"])
    dist.barrier()
    parameters = sum(parameter.nbytes for parameter in subject.plain.parameters())
    return {"whole": whole, "shares": shares, "compiled": by_graph, "parameters": parameters}


def _peak(model: torch.nn.Module, step: Step) -> int:
    """Of the second step, before which there are no gradients."""
    step()
    model.zero_grad()
    found = peak_tensor_bytes(step, "cpu")
    model.zero_grad()
    return found


def _peaks(model: torch.nn.Module, step: Step) -> list[int]:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, _peak(model, step))
    return shares


def traffic(case: str) -> list[dict[str, Any]]:
    """{collective: [calls, bytes to send]} of a step on each rank, as Gloo records them."""
    subject = _subject(case, compiles=False)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _recorded(subject.arms["distconv"], subject.x.element_size()))
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


def channel_traffic() -> list[dict[str, Any]]:
    """Bytes that convolutions with sharded channels move, by layer, partition and algorithm, beside the formulas."""
    return list(channels.moved(lambda step: sum(sent for _, sent in _recorded(step, 4).values())))


def channel_fixed(rounds: int) -> dict[str, list[float]]:
    """Seconds of a convolution with sharded channels, and of one rank's share of it alone, in turn."""
    return _rounds(_channel_arms(), rounds)


@functools.cache
def _channel_arms() -> dict[str, Step]:
    return channels.arms()


ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action for action in (error, speed, fixed, memory, traffic, wide, channel_traffic, channel_fixed)
}


def main(backend: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    if backend == "mpi":
        from distconv.mpi import init_process_group

        init_process_group()
    else:
        rank, ranks, store = arguments
        dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    while True:
        request = [json.loads(sys.stdin.readline() or '"end"') if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(request)
        if request[0] == "end":
            break
        answer = ACTIONS[request[0].pop("do")](**request[0])
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
