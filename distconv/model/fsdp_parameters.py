"""Parameters of modules of FSDP2, which gathers them, and may keep them whole from one call to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def parameters_of_fsdp(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters of modules of FSDP2, whether they are whole now or sharded.

    FSDP takes the gradients of a module right after its backward, so they have to be there by then.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    return {id(x) for module in modules if isinstance(module, fsdp.FSDPModule) for x in module.parameters()}
