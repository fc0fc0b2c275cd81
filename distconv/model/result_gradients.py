"""The gradient of a model's result, for which a script asks: by `torch.autograd.grad`, a hook, or `retain_grad`.

A script gets a result of a model as another tensor than the one that the model goes on with: gathered, or as a DTensor.
In one process both are one tensor, whose gradient has also what other results, which the model computes from it, add.
So the gradient is taken at the model's own tensor, and is converted to the kind of the result. It cannot be taken of a
call in parts, whose results are those of one node of autograd's graph: then an error says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from distconv.model.direct.paths import takes_place
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.direct.shares import FromRoot, own_part
from distconv.model.shard_gather import cut, gather
from distconv.rules.operands.own_parts import apply
from distconv.tensors.autograd_nodes import GIVEN_RESULTS, RESULTS_OF_PARTS
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import in_place_of, replace, until_put_back

Hook = Callable[[Tensor], Tensor | None]


class Origin(NamedTuple):
    """The tensor of a model that a result was made of."""

    edge: GradientEdge  # Where autograd finds its gradient.
    place: ShapedLayout | None  # Its layout, if it is the local tensor of an activation; else it is a DTensor.
    is_plain: bool  # Whether the result is a plain, whole tensor.

    def given(self, grad: Tensor) -> Tensor:
        """A gradient that autograd has found, for the script."""
        if self.place is not None and not isinstance(grad, DTensor):
            grad = apply(FromRoot, grad, self.place)
        return gather(grad) if self.is_plain else grad

    def taken(self, grad: Tensor, like: Tensor) -> Tensor:
        """A gradient of the script, for autograd. ``like``: the one that autograd has found."""
        if self.place is not None and not isinstance(like, DTensor):
            return own_part(grad, self.place)
        if isinstance(grad, DTensor) or not isinstance(like, DTensor):
            return grad
        return cut(grad, like.device_mesh, like.placements)


def origin_of(x: Any) -> Origin | None:
    """The origin of a result, or of the edge of one, of a model on ranks; None for all other tensors."""
    edge, place = x, None
    while isinstance(edge, Tensor | GradientEdge):
        node: Any = edge.grad_fn if isinstance(edge, Tensor) else edge.node
        if node not in GIVEN_RESULTS:
            break
        place = getattr(node, "place", None)
        edge = GradientEdge(*node.next_functions[0])
    return None if edge is x else Origin(edge, place, not isinstance(x, DTensor))


def refuse_results_of_parts(inputs: Iterable[Any], how: str) -> None:
    """Raises for inputs that are results of a call in parts from which the call has computed other results."""
    for x in inputs:
        node: Any = x.grad_fn if isinstance(x, Tensor) else getattr(x, "node", None)
        if node in RESULTS_OF_PARTS and node.call.wholes.is_read_by_others(x.output_nr):
            raise UnsupportedOperation(
                f"parts in turn: {how} of result {1 + x.output_nr} of a call, from which the call has computed other"
                " results; accepted: without parts, or in parts of a model that ends with that result"
            )


@until_put_back
def open_result_gradients() -> None:
    """Lets hooks and `retain_grad` of results have the whole gradient, from now on."""
    for name, function in (("register_hook", _register_hook), ("retain_grad", _retain_grad)):
        real = getattr(Tensor, name)
        replace(Tensor, name, takes_place(real, in_place_of(real, function)))


def _register_hook(real: Callable[..., Any], x: Tensor, hook: Hook) -> Any:
    if type(x) not in (Tensor, DTensor) or x.grad_fn is None:
        return real(x, hook)
    refuse_results_of_parts([x], "register_hook")
    origin = origin_of(x)
    return real(x, hook) if origin is None else _watched(origin, weakref.ref(x), hook)


def _retain_grad(real: Callable[..., Any], x: Tensor) -> None:
    already = x.retains_grad
    real(x)
    if already or type(x) not in (Tensor, DTensor) or x.grad_fn is None:
        return
    refuse_results_of_parts([x], "retain_grad")
    if (origin := origin_of(x)) is not None:
        _watched(origin, weakref.ref(x), lambda grad: None)


def _watched(origin: Origin, result: weakref.ref[Tensor], hook: Hook) -> Any:
    """Calls a hook with the gradient of an origin; if the result retains its gradient, that is then kept."""
    node, number = origin.edge.node, origin.edge.output_nr

    def before(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        found = grads[number]
        if found is None:
            return None
        grad = origin.given(found)
        changed = hook(grad)
        x = result()
        if x is not None and x.retains_grad:
            x.grad = grad if changed is None else changed
        if changed is None:
            return None
        return (*grads[:number], origin.taken(changed, found), *grads[number + 1 :])

    return node.register_prehook(before)
