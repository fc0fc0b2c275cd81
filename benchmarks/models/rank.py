"""One rank of benchmarks/models/models.py: rank 0 reads requests, a JSON object per line, and prints an answer to each.

python benchmarks/models/rank.py fake RANKS               one process that stands for all ranks; nothing is sent
python benchmarks/models/rank.py gloo RANK RANKS STORE    real ranks
python benchmarks/models/rank.py alone                    one process, which computes parts in turn
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.trial import Trial
from benchmarks.models.zoo import zoo


class Rank:
    """Answers requests; keeps the model that it built last."""

    def __init__(self, real: bool) -> None:
        self.real, self.entries = real, zoo()
        self.name, self.trial = "", None

    def answer(self, model: str, partition: str) -> dict[str, Any]:
        if model != self.name or self.trial is None:
            self.trial = None  # its memory goes before the next takes some
            try:
                self.name, self.trial = model, Trial(self.entries[model])
            except Exception as error:
                return {"result": "not built", "reason": f"{type(error).__name__}: {error}"[:2000]}
        found = self.trial.attempt(partition, compare=self.real)
        return {**found, "parameters": self.trial.parameters}


def main() -> None:
    transport, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    real = transport == "gloo"
    if real:
        rank, ranks, store = rest
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    elif transport == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(rest[0]))
        dist.all_to_all_single = _nothing_comes  # the group's own refuses a rank that sends nothing and receives some
    answering = Rank(real)
    while request := _next(real):
        with contextlib.redirect_stdout(io.StringIO()):
            found = answering.answer(**request)
        if not real or dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    os._exit(0)


def _nothing_comes(output: Tensor, *args: Any, **kwargs: Any) -> _Work:
    output.zero_()
    return _Work()


class _Work:
    """A collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def _next(real: bool) -> dict[str, Any] | None:
    """The next request, the same on every rank; None at the end."""
    line = sys.stdin.readline() if not real or dist.get_rank() == 0 else ""
    request = [json.loads(line) if line.strip() else None]
    if real:
        dist.broadcast_object_list(request, 0)
    return request[0]


if __name__ == "__main__":
    main()
