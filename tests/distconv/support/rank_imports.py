"""Imports what ranks need, in the process from which they are forked.

Nothing is collected as garbage meanwhile, nor looked through by later collections.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

IMPORTED = ("torch._dynamo", "torch.distributed.tensor", "distconv.model.interface", "hypothesis", "pytest")

gc.disable()
for name in IMPORTED:
    with contextlib.suppress(ModuleNotFoundError):  # the tests of tests/gpu do without hypothesis
        importlib.import_module(name)
gc.freeze()
gc.enable()
