"""A rank, or one process, of benchmarks/models/models.py: what it answers."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.models.trial import Trial
from benchmarks.models.zoo import zoo
from distconv.transfer import group_calls


class Rank:
    """Answers requests; keeps the model that it built last."""

    def __init__(self) -> None:
        self.entries = zoo()
        self.name, self.trial = "", None
        self.real = dist.is_initialized() and dist.get_backend() == "gloo"
        if (
            dist.is_initialized() and not self.real
        ):  # the group's own refuses a rank that sends nothing and receives some
            group_calls.all_to_all_single = _nothing_comes

    def attempt(self, model: str, partition: str) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            if model != self.name or self.trial is None:
                self.trial = None  # its memory goes before the next takes some
                try:
                    self.name, self.trial = model, Trial(self.entries[model])
                except Exception as error:
                    return {"result": "not built", "reason": f"{type(error).__name__}: {error}"[:2000]}
            found = self.trial.attempt(partition, compare=self.real)
        return {**found, "parameters": self.trial.parameters}


class _Work:
    """A collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def _nothing_comes(output: Tensor, *args: Any, **kwargs: Any) -> _Work:
    output.zero_()
    return _Work()
