"""The jobs of a program, one after another: each lasts as long as its default process group."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from typing import Any

import torch.distributed as dist

from distconv.tensors import hooks
from distconv.tensors.replacements import replace, until_put_back

_jobs: dict[Any, tuple[int, int]] = {}
"""By the default groups of jobs that have meshes: their numbers, and the threads that made the first mesh."""

_numbers = itertools.count()


def number_of(job: Any) -> int:
    """The number of a job, by its default group, among those of this process that have had meshes."""
    _watch()
    if job not in _jobs:
        thread = threading.get_ident()  # each part in turn has a job of its own
        for former in [each for each, (_, its) in _jobs.items() if its == thread]:
            _end(former)  # its groups were destroyed after distconv.shutdown
        _jobs[job] = next(_numbers), thread
    return _jobs[job][0]


@until_put_back
def _watch() -> None:
    stock: Any = dist.ProcessGroup.shutdown

    @functools.wraps(stock)
    def shutdown(group: Any) -> None:
        stock(group)
        _end(group)

    replace(dist.ProcessGroup, "shutdown", shutdown)


def _end(job: Any) -> None:
    if _jobs.pop(job, None):
        for forget in hooks.after_jobs:
            forget(job)
        gc.collect()  # plans, and the layouts that they are kept with, refer to each other
