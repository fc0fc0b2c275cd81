"""The layers of the cases as functions of JAX, on arrays as torch lays them: (N, C, spatial...)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conformance.cases import Layer, Shape

Parameters = dict[str, Any]
Function = Callable[[Parameters, Any], Any]

PAD_MODES = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}
EPSILON = 1e-5


def build(layer: Layer) -> Function:
    """A function of parameters, by the names that torch's module gives them, and an input."""
    return _BUILDERS[layer.kind](layer.shape, **layer.options)


def _per_channel(value: Any, dims: int) -> Any:
    return value.reshape(-1, *(1,) * (dims - 2))


def _convolution(
    shape: Shape, filters: int, kernel: Any, groups: int = 1, mode: str = "zeros", **sizes: Any
) -> Function:
    pads: list[tuple[int, int]] = []
    for place, (k, dilation) in enumerate(zip(kernel, sizes["dilation"], strict=True)):
        if sizes["padding"] == "same":
            total = dilation * (k - 1)
            pads.append((total // 2, total - total // 2))
        else:
            pads.append((sizes["padding"][place],) * 2)

    def function(p: Parameters, x: Any) -> Any:
        padding = pads
        if mode != "zeros":
            x = jnp.pad(x, [(0, 0), (0, 0), *pads], mode=PAD_MODES[mode])
            padding = [(0, 0)] * len(pads)
        y = jax.lax.conv_general_dilated(
            x,
            p["weight"],
            sizes["stride"],
            padding,
            rhs_dilation=sizes["dilation"],
            feature_group_count=groups,
        )
        return y + _per_channel(p["bias"], x.ndim)

    return function


def _transposed(shape: Shape, filters: int, kernel: Any, groups: int = 1, **sizes: Any) -> Function:
    dims = len(kernel)
    reach = [d * (k - 1) for k, d in zip(kernel, sizes["dilation"], strict=True)]
    pads = [
        (r - padding, r - padding + more)
        for r, padding, more in zip(reach, sizes["padding"], sizes["output_padding"], strict=True)
    ]

    def function(p: Parameters, x: Any) -> Any:
        w = jnp.flip(p["weight"], range(2, 2 + dims))
        w = w.reshape(groups, shape[1] // groups, filters // groups, *kernel).swapaxes(1, 2)
        w = w.reshape(filters, shape[1] // groups, *kernel)
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (1,) * dims,
            pads,
            lhs_dilation=sizes["stride"],
            rhs_dilation=sizes["dilation"],
            feature_group_count=groups,
        )
        return y + _per_channel(p["bias"], x.ndim)

    return function


def _pool(
    shape: Shape,
    of: str,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    output_padding: Any,
    ceil: bool = False,
    counts_padding: bool = True,
) -> Function:
    pads = []
    for n, k, s, p, d in zip(shape[2:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        more = max(0, math.ceil((n + 2 * p - reach) / s) * s + reach - n - 2 * p) if ceil else 0
        pads.append((p, p + more))
    window = ((1, 1, *kernel), (1, 1, *stride), [(0, 0), (0, 0), *pads])

    def largest(p: Parameters, x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)

    def largest_apart(p: Parameters, x: Any) -> Any:
        """Of shifted slices: reduce_window has no gradient with a dilation."""
        for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
            x = jnp.pad(
                x, [pads[axis - 2] if dim == axis else (0, 0) for dim in range(x.ndim)], constant_values=-jnp.inf
            )
            ends = range(x.shape[axis] - d * (k - 1), x.shape[axis] + 1, d)
            x = jnp.stack([jax.lax.slice_in_dim(x, i * d, end, s, axis) for i, end in enumerate(ends)]).max(0)
        return x

    def mean(p: Parameters, x: Any) -> Any:
        total = jax.lax.reduce_window(x, 0.0, jax.lax.add, *window)
        if counts_padding:
            return total / math.prod(kernel)
        return total / jax.lax.reduce_window(jnp.ones_like(x), 0.0, jax.lax.add, *window)

    if of == "mean":
        return mean
    return largest if set(dilation) == {1} else largest_apart


def _adaptive(shape: Shape, of: str, size: Any) -> Function:
    intervals = [[(i * n // o, -(-(i + 1) * n // o)) for i in range(o)] for n, o in zip(shape[2:], size, strict=True)]

    def function(p: Parameters, x: Any) -> Any:
        for axis, cut in enumerate(intervals, 2):
            reduce = jnp.max if of == "max" else jnp.mean
            pieces = [reduce(jax.lax.slice_in_dim(x, *ends, axis=axis), axis, keepdims=True) for ends in cut]
            x = jnp.concatenate(pieces, axis)
        return x

    return function


def _normalised(x: Any, axes: tuple[int, ...]) -> Any:
    centred = x - x.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + EPSILON)


def _batch_norm(p: Parameters, x: Any, name: str = "") -> Any:
    weight, bias = (_per_channel(p[f"{name}{kind}"], x.ndim) for kind in ("weight", "bias"))
    return _normalised(x, (0, *range(2, x.ndim))) * weight + bias


def _group_norm(p: Parameters, x: Any, groups: int) -> Any:
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    normalised = _normalised(parts, tuple(range(2, parts.ndim))).reshape(x.shape)
    return normalised * _per_channel(p["weight"], x.ndim) + _per_channel(p["bias"], x.ndim)


def _layer_norm(p: Parameters, x: Any) -> Any:
    weight, bias = (_per_channel(p[f"norm.{kind}"], x.ndim) for kind in ("weight", "bias"))
    return _normalised(x, (1,)) * weight + bias


def _norm(shape: Shape, of: str) -> Function:
    if of in ("group", "instance"):
        groups = 4 if of == "group" else shape[1]
        return lambda p, x: _group_norm(p, x, groups)
    return _batch_norm if of == "batch" else _layer_norm


def _resize(shape: Shape, mode: str, size: Any, corners: bool) -> Function:
    wanted = (*shape[:2], *size)
    if not corners:
        method = "nearest" if mode == "nearest" else "linear"
        return lambda p, x: jax.image.resize(x, wanted, method, antialias=False)
    scale = np.array([(m - 1) / (n - 1) for n, m in zip(shape[2:], size, strict=True)])

    def function(p: Parameters, x: Any) -> Any:
        moved = 0.5 - 0.5 * scale
        return jax.image.scale_and_translate(x, wanted, (2, 3), jnp.asarray(scale), jnp.asarray(moved), "linear", False)

    return function


def _shuffle(shape: Shape, factor: int) -> Function:
    n, c, h, w = shape
    parts, order = (n, c // factor**2, factor, factor, h, w), (0, 1, 4, 2, 5, 3)
    return lambda p, x: x.reshape(parts).transpose(order).reshape(n, c // factor**2, h * factor, w * factor)


def _attention(shape: Shape, heads: int) -> Function:
    def function(p: Parameters, x: Any) -> Any:
        samples, channels = shape[:2]
        tokens = x.reshape(samples, channels, -1).swapaxes(1, 2)
        q, k, v = (
            (tokens @ p[f"{name}.weight"].T).reshape(samples, -1, heads, channels // heads)
            for name in ("query", "key", "value")
        )
        # By hand, as jax.nn.dot_product_attention takes its softmax in float32.
        weights = jax.nn.softmax(jnp.einsum("nqhc,nkhc->nhqk", q, k) / math.sqrt(channels // heads))
        met = jnp.einsum("nhqk,nkhc->nqhc", weights, v).reshape(tokens.shape)
        return (met @ p["out.weight"].T).swapaxes(1, 2).reshape(shape)

    return function


def _block(shape: Shape) -> Function:
    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    def function(p: Parameters, x: Any) -> Any:
        y = jax.nn.relu(_batch_norm(p, convolve(x, p["first.weight"]), "norm."))
        return jax.nn.relu(_batch_norm(p, convolve(y, p["second.weight"]), "last_norm.") + x)

    return function


def _head(shape: Shape, classes: int) -> Function:
    return lambda p, x: x.reshape(shape[0], -1) @ p["1.weight"].T + p["1.bias"]


_BUILDERS: dict[str, Callable[..., Function]] = {
    "convolution": _convolution,
    "transposed": _transposed,
    "pool": _pool,
    "adaptive": _adaptive,
    "norm": _norm,
    "resize": _resize,
    "shuffle": _shuffle,
    "softmax": lambda shape, dim: lambda p, x: jax.nn.softmax(x, dim),
    "attention": _attention,
    "block": _block,
    "head": _head,
}
