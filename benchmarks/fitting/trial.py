"""One network within one limit, in all ways, in one process: `fits.py` starts it beneath its counter of allocations.

    python benchmarks/fitting/trial.py "3-D U-Net, step" 0.5 --rounds 2

The limit is a share of what plain torch takes. Prints one line of JSON: for each way its median seconds, its most
bytes of tensors and kernels' scratch, weights and inputs included, and the error of its numbers.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import distconv
from benchmarks.fitting.networks import NETWORKS, Network
from benchmarks.harness import Record, parser, turns

PIECE = 1 << 16  # Elements.


class _Again(nn.Module):
    """A block that backward computes again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def _checkpointed(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, blocks):
            setattr(model, name, _Again(child))
        else:
            _checkpointed(child, blocks)
    return model


def _budgeted(model: nn.Module, share: float) -> Any:
    torch._functorch.config.activation_memory_budget = share
    return torch.compile(model, backend="aot_eager_decomp_partition")


def _patched(model: nn.Module) -> nn.Module:
    from patch_conv import convert_model

    return convert_model(model, splits=4)  # type: ignore[no-any-return]


class _Moved(nn.Module):
    """A model of which all that autograd saves is moved."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.model(*inputs)


def ways(network: Network, share: float, limit: int) -> dict[str, Callable[[], nn.Module]]:
    """By name, what makes the model that is called in that way, of a copy of the network's."""

    def copied() -> nn.Module:
        return copy.deepcopy(network.model)

    found: dict[str, Callable[[], nn.Module]] = {
        "plain": copied,
        "--memory": lambda: distconv.fit(copied(), limit),
    }
    if network.blocks:
        found["checkpoints"] = lambda: _checkpointed(copied(), network.blocks)
        found["memory budget"] = lambda: _budgeted(copied(), share)
        found["save_on_cpu"] = lambda: _Moved(copied())
    else:
        found["patch_conv"] = lambda: _patched(copied())
    return found


def numbers(call: Any, network: Network) -> list[float]:
    """Of a step the loss, of inference the results' sums."""
    with torch.set_grad_enabled(bool(network.blocks)):
        results = [x for x in tree_leaves(call(*network.inputs)) if isinstance(x, Tensor)]
    if not network.blocks:
        # In pieces: the sum of a large tensor of doubles would copy it.
        return [sum(piece.double().sum().item() for piece in x.flatten().split(PIECE)) for x in results]
    loss = torch.stack([x.square().mean() for x in results if x.requires_grad]).sum()
    loss.backward()
    return [loss.item()]


def measured(name: str, share: float, rounds: int) -> Record:
    """The record of a network within a share of what plain torch takes."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    network.model.train(bool(network.blocks))
    network.model.requires_grad_(bool(network.blocks))
    counter = ctypes.CDLL(None)
    for function in ("counted_now", "counted_most"):
        getattr(counter, function).restype = ctypes.c_long

    def called(model: nn.Module) -> Record:
        gc.collect()
        torch.manual_seed(0)  # of dropout
        attributes = [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]
        before = {id(x): x.nbytes for x in (*model.parameters(), *model.buffers(), *network.inputs, *attributes)}
        start = counter.counted_now() - sum(before.values())
        del attributes
        counter.count_anew()
        began = time.perf_counter()
        found = numbers(model, network)
        seconds = time.perf_counter() - began
        bytes_ = counter.counted_most() - start
        model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "bytes": bytes_, "numbers": found}

    plain = copy.deepcopy(network.model)
    called(plain)
    right = called(plain)
    del plain
    limit = int(share * right["bytes"])
    record: Record = {"network": name, "share": share, "limit": limit, "whole": right["bytes"], "ways": {}}
    made, calls = {}, {}
    for way, make in ways(network, share, limit).items():
        began = time.perf_counter()
        try:
            made[way] = make()
            calls[way] = [called(made[way])]
        except Exception as error:
            made.pop(way, None)
            record["ways"][way] = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        else:
            record["ways"][way] = {"first": time.perf_counter() - began}

    def again(way: str) -> float:
        calls[way].append(called(made[way]))
        return float(calls[way][-1]["seconds"])

    seconds = turns({way: lambda way=way: again(way) for way in made}, 0, least=rounds)  # type: ignore[misc]
    for way, found in seconds.items():
        last = calls[way][-1]["numbers"]
        error = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(last, right["numbers"], strict=True))
        peak = max(call["bytes"] for call in calls[way][1:])
        record["ways"][way] |= {"seconds": median(found), "bytes": peak, "error": error}
    return record


def main() -> None:
    made = parser(__doc__)
    made.add_argument("network", choices=NETWORKS, metavar="NETWORK", help="; ".join(NETWORKS))
    made.add_argument("share", type=float, help="of what plain torch takes")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    options = made.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(getattr(torch, options.dtype))
    print(json.dumps(measured(options.network, options.share, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
