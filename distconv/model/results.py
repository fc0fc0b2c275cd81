"""The results of a script's calls of models: the script gets small ones as plain tensors, others distributed.

On a small tensor, an operator on shards costs the host more than the operator itself. So a result of a few KiB is
gathered once, and what the script computes from it, such as its loss, is stock torch on every rank. If ranks then do
different things, as with different targets, their gradients of the result differ; these are compared. Results stay
distributed on GPUs, where kernels that add up in an order of their own would give each rank another gradient. They also
stay distributed if the model was given distributed tensors: its targets are likely to be distributed as well.

If a function combines tensors of different meshes, as in models on several, they are redistributed to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from distconv.agreement.ledger import ledger, settle
from distconv.model.direct.parameters import is_own
from distconv.model.direct.paths import is_in_place, running
from distconv.model.shard_gather import cut, gather, whole
from distconv.tensors.arguments import each_of
from distconv.tensors.autograd_nodes import GIVEN_RESULTS
from distconv.tensors.layouts import added_up
from distconv.tensors.mesh import is_ours
from distconv.transfer.redistribution import redistributed

LARGEST_PLAIN = 64 << 10  # Bytes of the largest result that a script is given as a plain tensor.


@GIVEN_RESULTS
class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor, what: str) -> Tensor:
        ctx.layout, ctx.what = (y.device_mesh, tuple(added_up(y.placements))), what
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        mesh, layout = ctx.layout
        grad = gather(grad)  # distributed if the script has combined the result with a distributed tensor
        if (noted := ledger(mesh)) is not None:
            noted.note(ctx.what, grad)
        return cut(grad, mesh, layout), None


def for_caller(result: Any, what: str, outer: DeviceMesh | None, plain: bool) -> Any:
    """The results of a model's call, in any nested form, for its caller: on the mesh ``outer`` if one is given.

    what: names the call in errors. plain: whether small ones become plain tensors; collective over their meshes.
    """
    given: dict[int, Tensor] = {}  # a tensor that occurs twice among the results stays one object

    def hand_over(y: DTensor) -> Tensor:
        if id(y) not in given:
            given[id(y)] = (
                _plain(y, what) if plain and _is_to_be_plain(y) else y if outer is None else on_mesh(outer, y)
            )
        return given[id(y)]

    return tree_map_only(DTensor, hand_over, result)


def _is_to_be_plain(y: DTensor) -> bool:
    is_small = y.numel() * y.element_size() <= LARGEST_PLAIN
    return (
        is_small and y.device_mesh.device_type == "cpu" and is_ours(y.device_mesh) and not isinstance(y, nn.Parameter)
    )


def _plain(y: DTensor, what: str) -> Tensor:
    if not (y.requires_grad and torch.is_grad_enabled()):  # without backward no gradients are compared
        settle(y.device_mesh)
    return _Plain.apply(y, f"gradient of a result of {what}")


def on_mesh(mesh: DeviceMesh, x: DTensor) -> DTensor:
    """A tensor redistributed to a mesh; unchanged if it is on a mesh that the program has made for itself."""
    return x if x.device_mesh == mesh or not is_ours(x.device_mesh) else redistributed(x, mesh)


class OnOneMesh(TorchFunctionMode):
    """Redistributes the tensors that a function combines to the mesh of the calling module, or to that of the tensor
    that the function changes in place."""

    def __init__(self, mesh: Callable[[], DeviceMesh]) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if running.uses is not None and not is_own(func, args, kwargs):
            args, kwargs = running.uses.given(args, kwargs)
        meshes = {x.device_mesh for x in each_of(DTensor, (*args, *kwargs.values()))}
        if len(meshes) < 2 or not all(map(is_ours, meshes)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changed = kwargs.get("out") if "out" in kwargs else args[0] if is_in_place(name) else None
        mesh = next((x.device_mesh for x in each_of(DTensor, (changed,))), self.mesh())
        args, kwargs = tree_map_only(DTensor, lambda x: on_mesh(mesh, x), (args, kwargs))
        return func(*args, **kwargs)
