"""The direct path: while a model runs, its usual layers compute on a rank's own tensors, recorded by autograd as such.

An operator on DTensors passes through Python once forward and once more backward. Here an activation carries the plain
tensor that this rank owns. The functions that have a direct path compute with that, so that what needs no other rank is
torch's own operator with torch's own backward; only exchanges and statistics are functions of ours. Every other
function is given DTensors, and goes on as it does outside a model.
"""

import functools
import importlib
import pkgutil


@functools.cache
def discover() -> None:
    """Imports every module of this folder, which registers its paths."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
