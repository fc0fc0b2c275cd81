"""Layers that take their direct path at once.

Their `forward`, and torch's search for what an activation does in the function that this calls, take as long as a small
layer itself. They are left out where nothing but torch's own code would run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from distconv.model.direct.activation import Activation
from distconv.model.direct.paths import paths, running
from distconv.model.direct.pointwise import changed
from distconv.private_names import LAYERS, lacks


class _Layer(NamedTuple):
    """What a call of one of torch's layers passes, all of which must be torch's own."""

    compute: Callable[[Any, Any, Activation], Any]  # From the path, the layer and its input to the result.
    methods: list[tuple[str, Any]]  # The methods of the class,
    name: str  # and the function of `torch.nn.functional` that they call,
    function: Any  # which is this one.


_layers: dict[type[nn.Module], _Layer] = {}


def _layer(name: str, method: str, *kinds: type[nn.Module]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        for kind in () if lacks(LAYERS) else kinds:
            methods = [(each, getattr(kind, each)) for each in ("forward", method)]
            _layers[kind] = _Layer(compute, methods, name, getattr(F, name))
        return compute

    return register


def layer_result(module: nn.Module, x: Any) -> Any:
    """The result of a layer of a running model; NotImplemented where it is to be called as any other module is."""
    kind = type(module)
    layer = _layers.get(kind)
    if layer is None or type(x) is not Activation or running.closed or getattr(F, layer.name) is not layer.function:
        return NotImplemented
    own = module.__dict__
    for name, method in layer.methods:
        if name in own or getattr(kind, name) is not method:
            return NotImplemented
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if hooks or _has_any_global_hook() or torch._C._is_torch_function_mode_enabled():
        return NotImplemented
    return layer.compute(paths[layer.function], module, x)


@_layer("conv1d", "_conv_forward", nn.Conv1d)
@_layer("conv2d", "_conv_forward", nn.Conv2d)
@_layer("conv3d", "_conv_forward", nn.Conv3d)
def _convolved(path: Any, layer: Any, x: Activation) -> Any:
    parameters = layer._parameters
    if layer.padding_mode != "zeros" or "weight" not in parameters or "bias" not in parameters:
        return NotImplemented
    rest = layer.stride, layer.padding, layer.dilation, layer.groups
    return path(x, parameters["weight"], parameters["bias"], *rest)


@_layer("batch_norm", "_check_input_dim", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _normalized(path: Any, layer: Any, x: Activation) -> Any:
    parameters, buffers = layer._parameters, layer._buffers
    batches = buffers.get("num_batches_tracked")
    if not (layer.training and layer.track_running_stats and layer.momentum is not None and type(batches) is Tensor):
        return NotImplemented
    if "weight" not in parameters or "bias" not in parameters or "running_mean" not in buffers:
        return NotImplemented
    layer._check_input_dim(x)
    batches.add_(1)  # first, as torch does: a checkpoint that computes again may stop in the norm
    # Not `buffers[...]`, which writes what waits to be written, though nothing reads it here.
    statistics = buffers.get("running_mean"), buffers.get("running_var")
    given = x, *statistics, parameters["weight"], parameters["bias"], True, layer.momentum, layer.eps
    result = path(*given)
    return F.batch_norm(*given) if result is NotImplemented else result


@_layer("relu", "extra_repr", nn.ReLU)
def _rectified(_: Any, layer: Any, x: Activation) -> Any:
    if not layer.inplace:
        return paths[torch.relu](x)
    return changed(torch.relu_, x) if x.is_fresh and x.place.is_plain else NotImplemented
