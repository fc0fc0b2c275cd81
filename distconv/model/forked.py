"""A process that a rank forks, such as a worker of a DataLoader: models run whole there, as only ranks communicate."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from distconv.agreement.ledger import forget_all
from distconv.tensors import hooks
from distconv.tensors.mesh import end_in_child, is_ours, whole_group
from distconv.transfer.tracing import forget_plans


def _run_whole(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a model in a forked process. RuntimeError, one line, where it has sharded parameters."""
    for x in (*module.parameters(), *module.buffers()):
        if isinstance(x, DTensor) and is_ours(x.device_mesh):
            whole_group(x.device_mesh)
    return module._call_impl(*args, **kwargs)


def _in_child() -> None:
    if end_in_child():
        forget_all()
        forget_plans()
        hooks.model_calls.insert(0, _run_whole)


@functools.cache
def run_whole_in_forked_processes() -> None:
    """From now on models run whole in processes that this one forks."""
    os.register_at_fork(after_in_child=_in_child)
