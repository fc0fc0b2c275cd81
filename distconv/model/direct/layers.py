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
from distconv.rules.normalization.running import count


class _Layer(NamedTuple):
    """What a call of one of torch's layers passes, all of which must be torch's own."""

    compute: Callable[[Any, Any, Activation], Any]  # From the path, the layer and its input to the result.
    forward: Any
    name: str  # Of another method of the class,
    method: Any  # which is this one,
    function: str  # and of the function of `torch.nn.functional` that they call,
    real: Any  # which is this one.


layers: dict[type[nn.Module], _Layer] = {}
"""By class: layers that `layer_result` may compute."""


def _layer(name: str, method: str, *kinds: type[nn.Module]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        for kind in () if lacks(LAYERS) else kinds:
            layers[kind] = _Layer(compute, kind.forward, method, getattr(kind, method), name, getattr(F, name))
        return compute

    return register


def layer_result(module: nn.Module, x: Any) -> Any:
    """The result of one of the `layers` of a running model; NotImplemented where it is to be called as others are."""
    kind: Any = type(module)
    compute, forward, name, method, function, real = layers[kind]
    if type(x) is not Activation or running.closed or getattr(F, function) is not real:
        return NotImplemented
    own = module.__dict__
    if kind.forward is not forward or getattr(kind, name) is not method or "forward" in own or name in own:
        return NotImplemented
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if hooks or _has_any_global_hook() or torch._C._is_torch_function_mode_enabled():
        return NotImplemented
    return compute(paths[real], module, x)


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
    count(batches)  # first, as torch does: a checkpoint that computes again may stop in the norm
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
