"""The direct path: while a model runs, its common layers compute with a rank's own plain tensors, which autograd
records.

An operator on DTensors passes through Python once in forward and once more in backward. In the direct path an
activation carries the plain tensor that this rank owns. The functions that have a direct path compute with that tensor.
So an operator that needs no other rank is torch's own, with torch's own backward; only exchanges and statistics are
functions of distconv. Every other function is given DTensors, and runs as it does outside a model.
"""

import importlib
import pkgutil

from distconv.tensors.replacements import once_in_process


@once_in_process
def import_paths() -> None:
    """Imports every module of this folder, which registers its paths."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
