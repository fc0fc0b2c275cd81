"""`repr` and `print` of a distributed tensor: the text of the whole tensor, as plain torch writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.private_names import PRINTED, lacks
from distconv.rules.registry import method
from distconv.rules.whole import whole_value
from distconv.tensors.autograd_nodes import LAYOUT_CHANGES
from distconv.tensors.refusal import UnsupportedOperation, in_words


@method("__repr__")
def text(stock_method: Any, x: DTensor, *, tensor_contents: Any = None) -> str:
    """All ranks must ask for it. Within a model's call a large tensor is described, as by `distconv.layout`."""
    if type(x._local_tensor) is not Tensor or x._local_tensor.is_meta or torch.compiler.is_compiling():
        return stock_method(x)
    try:
        whole = whole_value("repr", x.detach())
    except UnsupportedOperation:
        return described(x)
    if isinstance(x, nn.Parameter):
        return repr(nn.Parameter(whole, requires_grad=x.requires_grad))
    if x.grad_fn is None:
        return repr(whole.detach().requires_grad_(x.requires_grad))
    return _with_suffix(repr(whole), f"grad_fn=<{_recorded(x).name()}>")


def described(x: DTensor) -> str:
    """The shape of a distributed tensor, and its layout, in words."""
    layout = in_words(x.placements, x.device_mesh)
    return f"{tuple(x.shape)} {x.dtype} {layout}, on this rank {tuple(x._local_tensor.shape)}"


def _recorded(x: DTensor) -> Any:
    """The node of what computed a tensor, and not of what made a DTensor of the result."""
    node: Any = x.grad_fn
    while node in LAYOUT_CHANGES:
        following = node.next_functions[0][0]
        if following is None:
            break
        node = following
    return node


def _with_suffix(written: str, suffix: str) -> str:
    """A tensor's text with one more property, on a line of its own where the last one would grow too long."""
    body, last = written[:-1], written[:-1].rpartition("\n")[2]
    indent = len("tensor(")
    fits = not lacks(PRINTED) and len(last) + 2 + len(suffix) + 1 <= torch._tensor_str.PRINT_OPTS.linewidth
    return f"{body}, {suffix})" if fits else f"{body},\n{' ' * indent}{suffix})"
