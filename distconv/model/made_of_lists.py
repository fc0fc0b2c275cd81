"""`torch.tensor` and its relatives applied to lists of distributed numbers, such as the losses of an epoch.

torch reads the memory of each number directly, which a distributed tensor does not have.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distconv.private_names import SCRIPTED, lacks
from distconv.rules.whole import whole_value
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import replace, until_put_back

MAKERS = ("tensor", "as_tensor", "asarray")


@until_put_back
def read_distributed_numbers() -> None:
    """Makes the functions `MAKERS` receive plain tensors in place of distributed ones in lists, from now on."""
    for name in MAKERS:
        make = getattr(torch, name)
        reads = _reading(make)
        replace(torch, name, reads)
        operator = None if lacks(SCRIPTED) else torch.jit._builtins._find_builtin(make)
        if operator is not None:  # scripted functions know torch's functions as objects
            torch.jit._builtins._register_builtin(reads, operator)


def _reading(make: Any) -> Any:
    @functools.wraps(make)
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        return make(_with_whole(data) if isinstance(data, list | tuple) else data, *args, **kwargs)

    return made


def _with_whole(values: Any) -> Any:
    """The lists with whole plain tensors in place of distributed ones; a list that has none is returned as it is."""
    if not any(isinstance(value, DTensor | list | tuple) for value in values):
        return values
    return [
        whole_value("torch.tensor", value.detach())
        if isinstance(value, DTensor) and is_ours(value.device_mesh)
        else _with_whole(value)
        if isinstance(value, list | tuple)
        else value
        for value in values
    ]
