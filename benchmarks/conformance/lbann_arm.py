"""LBANN's DistConv for PyTorch: a plain module in `DistConvDDP`, called with a `DCTensor`.

Its package has the name of this project's. So the arm imports it from the checkout that LBANN_DISTCONV names, before
anything of this project's.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

CHECKOUT = Path(os.environ["LBANN_DISTCONV"])

sys.path.insert(0, str(CHECKOUT))

from distconv import DCTensor, DistConvDDP, ParallelStrategy  # isort: skip

from benchmarks.conformance.cases import cut_dims, parts

WAYS = ("",)


def versions() -> dict[str, str]:
    told = subprocess.run(
        ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return {"LBANN/DistConv": told.stdout.strip(), "torch": torch.__version__}


def begin() -> None:
    pass


@functools.cache
def strategy_of(partition: str, dims: int) -> ParallelStrategy:
    """Samples are cut by data parallelism, which the strategy makes of the ranks that its shards leave."""
    cut = cut_dims(partition, dims)
    counts = {cut[axis]: count for axis, count in parts(partition).items() if axis != "sample"} or {2: 1}
    return ParallelStrategy(tuple(counts.values()), tuple(counts), device_type="cpu")


def compute(module: nn.Module, x: Tensor, grad: Tensor, partition: str, way: str) -> dict[str, Tensor | None]:
    strategy = strategy_of(partition, x.dim())
    model = module
    if any(True for _ in module.parameters()):  # torch's DistributedDataParallel refuses a module without
        model = DistConvDDP(module, grad_reduction_factor=1, parallel_strategy=strategy)  # gradients are sums here
    given = DCTensor.distribute(_own_samples(x, strategy).requires_grad_(), strategy)
    y = model(given).to_replicate()
    y.backward(_own_samples(grad, strategy))
    gradients = {name: _plain(parameter.grad) for name, parameter in module.named_parameters()}
    whole = {"output": y, "input": given.grad.to_replicate()}
    return {name: _all_samples(value, strategy) for name, value in whole.items()} | gradients


def _plain(gradient: Tensor | None) -> Tensor | None:
    """Norms of a `DCTensor` leave gradients of the same kind to their parameters."""
    return gradient._tensor if isinstance(gradient, DCTensor) else gradient


def _own_samples(x: Tensor, strategy: ParallelStrategy) -> Tensor:
    return x.chunk(strategy.ddp_ranks)[strategy.ddp_ind].clone()


def _all_samples(x: Tensor, strategy: ParallelStrategy) -> Tensor:
    return DTensor.from_local(x.detach(), strategy.device_mesh["ddp"], [Shard(0)]).full_tensor()


def refused(error: Exception) -> bool:
    """Whether the error is one that the library raises to say what it does not support."""
    return isinstance(error, NotImplementedError) or str(error).startswith(("DistConv: ", "Invalid shard_dim"))
