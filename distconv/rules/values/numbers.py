"""What leaves torch: numbers, lists, arrays of other libraries, texts, copies, and pickled tensors.

They are those of the whole tensor, as in plain torch. A file that a job has written has the whole tensor as a plain
one, whatever object it is an attribute of: a process without distconv can read it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from distconv.private_names import COMPILED, PRINTED, lacks
from distconv.rules.registry import method, rule
from distconv.rules.whole import whole_value
from distconv.tensors import hooks
from distconv.tensors.autograd_nodes import LAYOUT_CHANGES
from distconv.tensors.dtensors import wrap
from distconv.tensors.gathering.record import PICKLED, script_code
from distconv.tensors.refusal import UnsupportedOperation, in_words
from distconv.transfer.local_part import replicate_single_dims
from distconv.transfer.redistribution import added


def _copied(what: str, x: DTensor) -> Tensor:
    whole = whole_value(what, x.detach()).clone()
    for notify in hooks.after_copies:
        notify(x, whole)
    return whole


@rule("aten::_local_scalar_dense")
def item(func: Any, x: DTensor) -> float | int | bool:
    """The element of a tensor of one element, the same on every rank."""
    x = replicate_single_dims(added(x), range(x.dim())) if x.numel() == 1 else x
    return torch.ops.aten._local_scalar_dense.default(whole_value(".item()", x))


# PyTorch refuses most of these for every subclass.
@method("__format__")
def formatted(stock_method: Any, x: DTensor, spec: str) -> str:
    """A number, as one process writes it."""
    return format(x.item(), spec) if x.dim() == 0 else object.__format__(x, spec)


@method("tolist")
def as_list(stock_method: Any, x: DTensor) -> Any:
    """Numbers in lists."""
    return whole_value(".tolist()", x).tolist()


@method("numpy")
def as_array(stock_method: Any, x: DTensor, *, force: bool = False) -> Any:
    """An array of the whole tensor, whose memory no tensor shares."""
    if x.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return _copied(".numpy()", x).numpy(force=force)


@method("__dlpack__")
def as_capsule(stock_method: Any, x: DTensor, **options: Any) -> Any:
    """The whole tensor for another library."""
    return _copied(".__dlpack__()", x).__dlpack__(**options)


@method("__dlpack_device__")
def capsule_device(stock_method: Any, x: DTensor) -> Any:
    """Where that is."""
    return x._local_tensor.__dlpack_device__()


@method("__deepcopy__")
def deepcopy(stock: Any, x: DTensor, memo: dict[int, Any]) -> DTensor:
    """A copy of this rank's shard, with its gradient and its attributes unless it is a parameter, as in torch.

    As of any tensor, only of a leaf.
    """
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        return stock(x, memo)
    with torch.no_grad():
        new: Any = wrap(x._local_tensor.clone(), x.device_mesh, x.placements, x.shape)
    if isinstance(x, nn.Parameter):
        memo[id(x)] = nn.Parameter(new, requires_grad=x.requires_grad)
        return memo[id(x)]
    memo[id(x)] = new.requires_grad_(x.requires_grad)
    new.__dict__.update(copy.deepcopy(x.__dict__, memo))
    if x.grad is not None:
        new.grad = copy.deepcopy(x.grad, memo)
    return new


@method("__reduce_ex__")
def reduce_protocol(stock_method: Any, x: DTensor, protocol: int) -> Any:
    """Pickles the whole tensor, with the attributes that a program has set on this one. Collective: it is gathered."""
    with script_code():  # a file is the script's, even where a hook writes it
        whole = whole_value(PICKLED, x.detach()).clone()
    plain = (
        nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole.requires_grad_(x.requires_grad)
    )
    plain.__dict__.update(x.__dict__)
    return plain.__reduce_ex__(protocol)


@method("untyped_storage")
def untyped_storage(stock_method: Any, x: DTensor) -> Any:
    """The storage of this rank's shard, which two DTensors share where one process's tensors would share theirs."""
    traced = not lacks(COMPILED) and TracingContext.try_get() is not None
    if traced:  # torch.compile takes a tensor and its shard for two tensors with a storage each
        return stock_method(x)
    return x._local_tensor.untyped_storage()


@method("as_subclass")
def as_subclass(stock: Any, x: DTensor, cls: type) -> DTensor:
    """The DTensor itself: nothing can be a DTensor and an instance of the program's subclass."""
    return x


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
