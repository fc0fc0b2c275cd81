"""Parameters as inputs of `torch.autograd.grad` and `torch.autograd.backward` within backward.

A script's autograd function that is given parameters in forward may compute a part of a model again in its backward,
and take the gradients of these parameters there: checkpoints of diffusion models and adjoint methods of differential
equations do this. In one process both passes read the same tensors. Here each has operands of its own, so the gradient
is taken where the second pass has its operands from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distconv.model.direct.paths import takes_place, temporarily
from distconv.model.gradients import Bucket, bucket_of
from distconv.model.result_gradients import open_result_gradients, origin_of, refuse_results_of_parts
from distconv.model.running import inside
from distconv.rules.operands.own_parts import Added, apply, wrapped
from distconv.tensors import hooks
from distconv.tensors.autograd_nodes import PARAMETER_USES, nodes_of
from distconv.tensors.read_parts import thread
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import in_place_of, replace, until_put_back
from distconv.transfer.redistribution import redistributed


@until_put_back
def open_gradients() -> None:
    """Lets `torch.autograd` find the gradients of results, and of parameters that a part of a model reads again."""
    open_result_gradients()
    for name, function in (("grad", _grad), ("backward", _backward)):
        real = getattr(torch.autograd, name)
        replace(torch.autograd, name, takes_place(real, in_place_of(real, function)))


_UNUSED = "appears to not have been used in the graph"

FROM_BEFORE = (
    "parts in turn: torch.autograd.grad within a model's call, of a tensor from which its inputs were computed before;"
    " accepted: without parts"
)


def _grad(
    real: Callable[..., Any], outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """In a script an input may also be a result of a model as the script got it, and batched gradients of outputs are
    passed one by one."""
    given = (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs)
    origins = [origin_of(x) for x in given] if hooks.scripts else []
    if any(origins):
        edges = [x if origin is None else origin.edge for x, origin in zip(given, origins, strict=True)]
        grads = _grad(real, outputs, edges, grad_outputs, *args, **kwargs)
        return tuple(g if g is None or o is None else o.given(g) for g, o in zip(grads, origins, strict=True))
    if hooks.scripts and kwargs.pop("is_grads_batched", False):
        args = (True, *args[1:])  # the graph is needed again
        kwargs.pop("retain_graph", None)
        each = [
            _grad(real, outputs, given, slices, *args, **kwargs)
            for slices in zip(*tree_leaves(grad_outputs), strict=True)
        ]
        return tuple(None if found[0] is None else torch.stack(found) for found in zip(*each, strict=True))
    refuse_results_of_parts(given, "torch.autograd.grad")
    found = _sources(outputs, given)
    if not found:
        try:
            return real(outputs, given, grad_outputs, *args, **kwargs)
        except RuntimeError as error:
            if thread.part is not None and _UNUSED in str(error):
                inside.refused = UnsupportedOperation(FROM_BEFORE)  # programs catch a RuntimeError here
            raise
    edges = [_edges(found, index, x) for index, x in enumerate(given)]
    with contextlib.ExitStack() as asked:
        for bucket in [bucket for own in found.values() for bucket in own.buckets]:
            asked.enter_context(temporarily(bucket, hands_on=True))
        grads = iter(real(outputs, [edge for own in edges for edge in own], grad_outputs, *args, **kwargs))
    each = [[x for _ in own if (x := next(grads)) is not None] for own in edges]
    sums = [functools.reduce(torch.add, own) if own else None for own in each]
    return tuple(found[at].gradient(x) if x is not None and at in found else x for at, x in enumerate(sums))


def _backward(
    real: Callable[..., Any],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    args = grad_tensors, retain_graph, create_graph, grad_variables
    values: Any = inputs.values() if type(inputs) is dict else () if inputs is None else inputs
    given = (values,) if isinstance(values, Tensor | GradientEdge) else tuple(values)
    refuse_results_of_parts(given, "torch.autograd.backward")
    found = _sources(tensors, given, accumulates=True) if given else {}
    if not found:
        return real(tensors, *args, given if given else inputs)
    taken: dict[Bucket, set[int]] = {}
    for own in found.values():
        for edge, bucket in zip(own.edges, own.buckets, strict=False):
            taken.setdefault(bucket, set()).add(edge.output_nr)
    with contextlib.ExitStack() as asked:
        for bucket, numbers in taken.items():
            asked.enter_context(temporarily(bucket, takes=numbers))
        return real(tensors, *args, [edge for at, x in enumerate(given) for edge in _edges(found, at, x)])


def _edges(found: dict[int, _Sources], index: int, x: Any) -> list[Any]:
    """What to give autograd in place of an input."""
    return found[index].edges if index in found else [x]


class _Sources(NamedTuple):
    """Where autograd is to find the gradient of an input that is, or represents, a parameter."""

    given: Tensor  # The input.
    edges: list[Any]  # What autograd is given in its place; the gradient is the sum of what it finds there.
    buckets: list[Bucket]
    """Those that hand the shares of this rank on to autograd for that time. Empty: there is one edge, the parameter
    itself, at which the sum over all ranks arrives."""

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient for the script, in the layout of the input."""
        if self.buckets:
            mesh = self.buckets[0].plan.places[0].mesh
            grad = apply(Added, grad, mesh, tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1))
        if not isinstance(self.given, DTensor):
            return grad
        mesh, placements = self.given.device_mesh, self.given.placements
        if isinstance(grad, DTensor):
            return redistributed(grad, mesh, placements)
        return wrapped(grad, mesh, placements, self.given.shape)


def _sources(outputs: Any, inputs: Sequence[Any], accumulates: bool = False) -> dict[int, _Sources]:
    """By index of the input: where the gradients of parameters are, if not at the input itself.

    ``accumulates``: whether autograd is to add them to those of the parameters.
    """
    asked: dict[int, tuple[Any, Bucket | None, Tensor]] = {}
    for index, x in enumerate(inputs):
        if isinstance(x, DTensor) and (use := x.grad_fn) in PARAMETER_USES:
            if (found := bucket_of(use)) is not None:
                asked[index] = use, found[0], found[0].plan.parameters[found[1]]
        elif hooks.bucket_classes and isinstance(x, nn.Parameter):
            asked[index] = x, None, x
    if not asked:
        return {}
    ends = (outputs,) if isinstance(outputs, Tensor | GradientEdge) else outputs
    read = nodes_of(x.grad_fn if isinstance(x, Tensor) else x.node for x in ends)
    buckets = [(node, node.bucket) for node in read if isinstance(getattr(node, "bucket", None), Bucket)]
    result = {}
    for index, (use, given, parameter) in asked.items():
        at = [
            (GradientEdge(node, number), bucket)
            for node, bucket in buckets
            for number, own in enumerate(bucket.plan.parameters)
            if own is parameter and bucket is not given
        ]
        is_read = use is not None and use in read
        if is_read and accumulates:
            raise UnsupportedOperation(
                f"torch.autograd.backward with a parameter {tuple(parameter.shape)} among inputs that outputs are"
                " computed from as a function was given it; accepted: torch.autograd.grad, or backward without inputs"
            )
        if is_read and at:
            raise UnsupportedOperation(
                f"torch.autograd.grad of a parameter {tuple(parameter.shape)} that outputs are computed from both as a"
                " function was given it and as a module has it; accepted: one of the two"
            )
        at = [(edge, bucket) for edge, bucket in at if bucket.is_apart]
        if not is_read and (at or inputs[index] is not parameter):
            result[index] = _Sources(inputs[index], [x for x, _ in at] or [parameter], [bucket for _, bucket in at])
    return result
