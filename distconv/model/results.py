"""The results of a script's calls of models: the script gets small ones as plain tensors, others distributed.

On a small tensor, an operator on shards costs the host more than the operator itself. So a result of a few KiB is
gathered once, and what the script computes from it, such as its loss, is stock torch on every rank. If ranks then do
different things, as with different targets, their gradients of the result differ; these are compared. Results stay
distributed on GPUs, where kernels that add up in an order of their own would give each rank another gradient. They also
stay distributed if the model was given distributed tensors: its targets are likely to be distributed as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from distconv.agreement.ledger import ledger, settle
from distconv.model.several_meshes import on_mesh
from distconv.model.shard_gather import cut, gather, whole
from distconv.tensors.autograd_nodes import GIVEN_RESULTS
from distconv.tensors.layouts import added_up
from distconv.tensors.mesh import is_ours

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
