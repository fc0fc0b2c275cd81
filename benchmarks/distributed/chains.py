"""What chains change: messages, bytes and seconds of a forward under `--halo layer` and `--halo chain`, and its error.

    python benchmarks/distributed/chains.py [--calls 20] [--save]

A message is one all-to-all that a rank begins, or a part in turn. Errors are in float64 against one process, of the
result and of all gradients. Prices are those of a processor, and, told as "cheap", those of GPUs, where a message costs
as much as many rows: times say nothing there, as everything runs on a processor.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from tqdm import tqdm

import distconv
from benchmarks.harness import finish, parser
from benchmarks.rank_pool import RankPool
from benchmarks.table import Table
from distconv import settings
from distconv.model import halos
from distconv.settings.parts import read_parts
from distconv.transfer.account import ACCOUNT
from distconv.transfer.route import Route
from distconv.turns.parts import parts_of
from mucudnn.networks.models import NETWORKS
from mucudnn.timing.clock import first_seconds


def stack() -> nn.Module:
    layers = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6))
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    model = NETWORKS["resnet18"].build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "6 convolutions, 128x128": (stack, (1, 16, 128, 128)),
    "ResNet-18, 64x64": (resnet, (1, 3, 64, 64)),
    "ResNet-18, 224x224": (resnet, (1, 3, 224, 224)),
}
CASES = [("ranks", "height=2"), ("ranks", "height=2,width=2"), ("in turn", "height=4")]
HALOS = ("layer", "chain", "chain, cheap")


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = [distconv.whole_state(p.grad) for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [distconv.gather(y.detach()), x.grad, *grads]


def measured(way: str, partition: str, name: str, halo: str, calls: int) -> dict[str, float]:
    """Messages, bytes sent, the median of seconds, and the error."""
    if "cheap" in halo:
        halos.PRICES.clear()
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().double().eval(), torch.randn(shape, dtype=torch.float64)
    expected = results(copy.deepcopy(model), x)
    messages = 0
    send = Route.send

    def counted(*args: Any) -> Any:
        nonlocal messages
        messages += 1
        return send(*args)

    with settings.options({"halo": halo.partition(",")[0]}):
        if way == "ranks":
            model = distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
        else:
            model = distconv.in_turn(model, partition)
        for _ in range(2):
            found = results(model, x)
        pairs = zip(found, expected, strict=True)
        error = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
        with torch.no_grad():
            model(x)

            def moved() -> int:
                return ACCOUNT.sent if way == "ranks" else parts_of(read_parts(partition), "cpu").pending.moved

            before = moved()
            with mock.patch.object(Route, "send", counted):
                model(x)
            sent = moved() - before
            seconds = [first_seconds(lambda: model(x)) for _ in range(calls)]
    return {"messages": messages, "bytes": sent, "seconds": statistics.median(seconds), "error": error}


class Server:
    def measured(self, *case: Any) -> dict[str, float]:
        return measured(*case)


def main() -> None:
    made = parser(__doc__, "chains-cpu")
    made.add_argument("--calls", type=int, default=20)
    made.add_argument("--only", choices=MODELS, action="append", help="this model alone (default: all)")
    options = made.parse_args()
    rows = []
    for (way, partition), name, halo in tqdm([*product(CASES, options.only or MODELS, HALOS)], disable=None):
        ranks = RankPool(read_parts(partition).ranks if way == "ranks" else 1, Server)
        answers = ranks.result("measured", way, partition, name, halo, options.calls)
        ranks.close()
        most = {key: max(answer[key] for answer in answers) for key in answers[0]}
        cells = (f"{most['messages']:.0f}", f"{most['bytes'] / 1024:.0f}")
        cells += (f"{1e3 * most['seconds']:.1f}", f"{most['error']:.0e}")
        rows.append((f"{name}, {partition}, {way}, {halo}", *cells))
    table = Table("A forward", ("model, partition, how, halo", "messages", "KiB", "ms", "error"), rows)
    finish(options, "chains-cpu", "Chains", __doc__, [table])


if __name__ == "__main__":
    main()
