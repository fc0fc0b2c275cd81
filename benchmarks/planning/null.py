"""What planning asks of cuDNN: plans, engines compiled at run time, launches, and the processor's time for plans.

    python tests/null_card/build.py PYTHON benchmarks/planning/null.py                    # on the null card; a minute
    python tests/null_card/build.py PYTHON benchmarks/planning/null.py --programs layer --precisions tf32

Each row is the first step of a program with nothing on record, measured ahead on the null card, whose times are made up
and whose convolutions are not computed. cuDNN's plans are real, and so is the time that it takes to make them. A plan
that cuDNN refuses counts, too. "Again" is what a second run asks for, which finds the database of the first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import mucudnn
from benchmarks.table import Table, show
from mucudnn.networks.models import NETWORKS
from mucudnn.providers import providers_on
from mucudnn.providers.cudnn.backend import Behavior
from mucudnn.providers.cudnn.graph import Engine, OperationGraph

Program = tuple[nn.Module, torch.Tensor, bool]
"""A model, its input, and whether it is trained."""

COUNTS = "plans", "compiled", "launches", "seconds"


def layer() -> Program:
    """A layer of 3x3 that only computes forward."""
    return nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(16, 64, 56, 56), False


def resnet18() -> Program:
    """A network in training."""
    found = NETWORKS["resnet18"]
    return found.build(), torch.randn(16, *found.input_shape), True


PROGRAMS: dict[str, Callable[[], Program]] = {"layer": layer, "resnet18": resnet18}


@contextmanager
def counting() -> Iterator[dict[str, float]]:
    """What is asked of cuDNN within; the numbers are there at its end."""
    from null_card import counted

    compiled = 0
    plan = OperationGraph.plan

    def watched(self: OperationGraph, engine: Engine, *knobs: Any) -> Any:
        nonlocal compiled
        compiled += Behavior.RUNTIME_COMPILATION in engine.behavior
        return plan(self, engine, *knobs)

    names = {"plans": "plans", "launches": "executed", "seconds": "plan_nanoseconds"}
    before = {name: counted(its) for name, its in names.items()}
    found: dict[str, float] = {}
    OperationGraph.plan = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        OperationGraph.plan = plan  # type: ignore[method-assign]
        found.update({name: counted(its) - before[name] for name, its in names.items()})
        found["compiled"] = compiled
        found["seconds"] *= 1e-9


def first_step(program: str, database: str, policy: str) -> dict[str, float]:
    """What the first step asks of cuDNN."""
    torch.manual_seed(0)
    model, x, is_trained = PROGRAMS[program]()
    model, x = model.cuda(), x.cuda()
    providers_on.cache_clear()  # whose providers keep plans
    settings: dict[str, Any] = {"planning": "ahead", "database": database, "policy": policy}
    with counting() as found, mucudnn.patched(**settings, check="off", progress="off"):
        with torch.set_grad_enabled(is_trained):
            y = model(x)
        if is_trained:
            y.sum().backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--precisions", nargs="+", choices=("ieee", "tf32"), default=["ieee", "tf32"])
    parser.add_argument("--policy", default="powerOfTwo", help="sizes of parts (default %(default)s)")
    chosen = parser.parse_args()
    # Read by the card at every launch.
    os.environ |= {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0"}
    rows = []
    for program in chosen.programs:
        for precision in chosen.precisions:
            torch.backends.cudnn.conv.fp32_precision = precision
            with tempfile.TemporaryDirectory() as folder:
                for run in ("first", "again"):
                    found = first_step(program, f"{folder}/times.sqlite", chosen.policy)
                    rows.append((f"{program}, {precision}, {run}", *(f"{found[name]:.4g}" for name in COUNTS)))
    show([Table(f"Asked of cuDNN under {chosen.policy}", ("", *COUNTS), rows)])


if __name__ == "__main__":
    main()
