"""Views whose elements lie on other ranks: they are copies, and to change a copy in place is refused.

In one process a change of a slice changes the whole tensor. The slice of a sharded dim is a copy, laid out anew, so its
change would be lost. A copy is known by its storage: views of it are copies too, what is computed from it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distconv.refusal import refuse
from distconv.rules.registry import checks, rule, unruled
from distconv.rules.stock import leave


def copy_of(view: DTensor, x: DTensor) -> DTensor:
    """``view``, the result of an operator that makes a view of ``x`` in one process, as a copy on every rank.

    Autograd's own slices, of gradients, are nobody's to change and stay as they are.
    """
    if torch._C._current_graph_task_id() != -1:
        return view
    watch_changes()
    if view._local_tensor.untyped_storage() is x._local_tensor.untyped_storage():
        view = DTensor(view._local_tensor.clone(), view._spec, requires_grad=False)
    view._local_tensor.untyped_storage()._distconv_copy = True  # type: ignore[attr-defined]
    return view


def _check_change(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for tensor in _changed(func, args, kwargs):
        if not isinstance(tensor, DTensor):
            continue
        if hasattr(tensor._local_tensor.untyped_storage(), "_distconv_copy"):
            raise refuse(
                func,
                f"it changes a tensor {tuple(tensor.shape)} in place that in one process is a view, but here, where"
                f" its dims are sharded, a copy; accepted: the operator that makes a new tensor, or .clone() first",
            )
        _count(tensor)
        if isinstance(tensor._base, DTensor):
            _count(tensor._base)


def _count(changed: DTensor) -> None:
    """Lets autograd know where it has kept the local tensor, too; beneath it a change is not counted."""
    if not changed._local_tensor.is_inference():
        torch.autograd.graph.increment_version(changed._local_tensor)


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from changed if isinstance(changed, list | tuple) else (changed,)


@functools.cache
def watch_changes() -> None:
    """From now on, look at every operator that changes a tensor, whether it has a rule or not."""
    checks.append(_check_change)
    rule(*unruled(_changes_elements))(leave)


_NO_ELEMENTS = {"aten::requires_grad_", "aten::retain_grad", "aten::set_data", "aten::record_stream"}


def _changes_elements(schema: Any) -> bool:
    """Whether an operator changes those of a tensor; what takes lists, as optimizers do, is passed over."""
    packet = getattr(torch.ops.aten, schema.name[len("aten::") :])
    return (
        any(isinstance(a.type, torch.TensorType) and a.alias_info and a.alias_info.is_write for a in schema.arguments)
        and torch.Tag.inplace_view not in getattr(packet, schema.overload_name or "default").tags
        and schema.name not in _NO_ELEMENTS
    )
