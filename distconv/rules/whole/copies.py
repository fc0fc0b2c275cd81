"""Copies in place of views of other ranks' elements: whatever is written to a copy is also written to its tensor.

In one process a change of a slice changes the whole tensor. The slice of a sharded dim is a copy with a layout of its
own, so its elements are sent back after each change. A copy is known by its storage: views of it are copies too,
results computed from it are not. Where there is no way back, a change is refused; so is a copy whose tensor has changed
since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import TensorWeakRef

from distconv.rules.registry import rule, unruled
from distconv.rules.schemas import changed_tensors, is_tensor, operator
from distconv.rules.stock import leave
from distconv.tensors import hooks
from distconv.tensors.dtensors import wrap_strided
from distconv.tensors.refusal import UnsupportedOperation, refuse
from distconv.tensors.replacements import once_in_process

Write = Callable[[DTensor, DTensor], None]
"""Writes the elements of a copy, the second tensor, to where the first has them."""


Part = tuple[int, range]  # A dim, and some of its positions.

_IN_GRAPHS = "_distconv_in_graphs"


class _Read:
    checked = False  # Whether a tensor with copies has been changed, so that copies are to be checked.


_read = _Read()

MOST_PARTS = 64  # The number of partial changes after which a tensor counts as changed everywhere.


@dataclass
class _History:
    """The changes of a storage by operators: on every rank the same ones."""

    whole: int = 0  # The number of changes of the whole tensor.
    parts: list[Part] = field(default_factory=list)  # The parts that were changed since.
    copied: bool = False  # Whether there are, or were, copies of its tensor.
    dims: Any = None  # The shape and the strides of the tensor to whose dims the parts refer.

    def add(self, part: Part | None) -> None:
        if self.copied:
            _watch_reads()
            _read.checked = True
        if part is None or len(self.parts) == MOST_PARTS:
            self.whole += 1
            self.parts.clear()
        else:
            self.parts.append(part)

    def now(self) -> tuple[int, int]:
        return self.whole, len(self.parts)


def _history(local: Tensor) -> _History:
    storage = local.untyped_storage()
    if not hasattr(storage, "_distconv_history"):
        storage._distconv_history = _History()  # type: ignore[attr-defined]
    return storage._distconv_history  # type: ignore[attr-defined]


def _overlap(part: Part, other: Part | None) -> bool:
    """Whether two parts may have an element in common."""
    if other is None or part[0] != other[0]:
        return True
    a, b = part[1], other[1]
    return bool(a and b) and a[0] <= b[-1] and b[0] <= a[-1] and not set(a).isdisjoint(b)


@dataclass
class _Copy:
    """The record of a copy, kept with its storage."""

    of: Callable[[], DTensor | None]
    write: Write | None
    node: tuple[int, int] | None  # Where a formula of backward made it: what others do with it later concerns nobody.
    layout: tuple[DeviceMesh, Sequence[Placement], Sequence[int], Sequence[int]]
    local: tuple[Sequence[int], Sequence[int], int]
    part: Part | None  # The positions that it has of the tensor, where they are those of one dim.
    seen: tuple[int, int]  # The changes of the tensor before the copy was made, or last written back.

    def is_stale(self, part: Part | None = None) -> bool:
        """Whether what the copy has, or a part of it, has been changed since, in its tensor or what that copies."""
        x = self.of()
        if x is None:
            return False
        history, above, part = _history(x._local_tensor), self._above(x), part or self.part
        if history.whole != self.seen[0] or any(_overlap(each, part) for each in history.parts[self.seen[1] :]):
            return True
        return above is not None and above.is_stale(above.part_of_part(part))

    def _above(self, x: DTensor) -> _Copy | None:
        """The record of the copy's tensor, if that is a copy, too. After `squeeze_` a copy is its own tensor."""
        found = _copied(x._local_tensor)
        return None if found is self else found

    def part_of_part(self, part: Part | None) -> Part | None:
        """Which part of its tensor a part of the copy is."""
        x = self.of()
        if part is None or self.part is None or part[0] != self.part[0] or x is None or x.dim() != len(self.layout[2]):
            return self.part
        positions = part[1]
        return self.part[0], self.part[1][positions.start : positions.stop : positions.step]

    def has_way_back(self) -> bool:
        """Whether its elements can be written to its tensor, and on to what that is a copy of."""
        x = self.of()
        above = None if x is None else self._above(x)
        return self.write is not None and (above is None or above.has_way_back())

    def whole(self, view: DTensor) -> DTensor:
        """The copy, of which ``view`` is one, or what has become of it."""
        local = view._local_tensor
        if getattr(local.untyped_storage(), "_distconv_copy", None) is not self:
            return view
        return wrap_strided(torch.as_strided(local.detach(), *self.local), *self.layout)


def copy_of(view: DTensor, x: DTensor, write: Write | None = None, part: Part | None = None) -> DTensor:
    """``view``, the result of an operator that makes a view of ``x`` in one process, as a copy on every rank.

    ``write(x, copy)`` writes changes of the copy to x; without it they are refused. ``part``: what it has of x.
    """
    watch_changes()
    local = view._local_tensor
    if local.untyped_storage() is x._local_tensor.untyped_storage():
        view = DTensor(local.clone(), view._spec, requires_grad=False)
        local = view._local_tensor
    node = _node()
    of: Callable[[], DTensor | None] = (lambda: x) if node is None else weakref.ref(x)
    layout = (view.device_mesh, view.placements, view.shape, view.stride())
    where = (local.shape, local.stride(), int(local.storage_offset()))
    history = _history(x._local_tensor)
    history.copied = True
    dims = (*x._local_tensor.shape, *x._local_tensor.stride())
    if history.dims is None:
        history.dims = dims
    if history.dims != dims:  # a view of the tensor, whose dims are others
        part = None
    copy = _Copy(of, write, node, layout, where, part, history.now())
    local.untyped_storage()._distconv_copy = copy  # type: ignore[attr-defined]
    return view


def _node() -> tuple[int, int] | None:
    """The graph and the node whose gradient is being computed."""
    graph = torch._C._current_graph_task_id()
    node: Any = torch._C._current_autograd_node() if graph != -1 else None
    return None if graph == -1 else (graph, -1 if node is None else node._sequence_nr())


def _check(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    """Refuses copies whose tensors have changed, and changes that cannot be written back; writes back the others."""
    for value in args:
        for tensor in value if type(value) is list else (value,):
            if isinstance(tensor, DTensor):
                copy = _copied(tensor._local_tensor)
                if copy is not None and copy.is_stale():
                    raise _stale(func, tensor)
    if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return None
    copies: list[tuple[DTensor, _Copy]] = []
    for tensor in changed_tensors(func, args, kwargs):
        if isinstance(tensor, DTensor):
            copy = _copied(tensor._local_tensor)
            if copy is not None:
                if not copy.has_way_back() or copy.is_stale():
                    raise refuse(
                        func,
                        f"it changes a tensor {tuple(tensor.shape)} in place, which in one process is a view. Here its"
                        f" dims are sharded, so it is a copy; accepted: the operator that makes a new tensor, or"
                        f" .clone() first",
                        whole_helps=False,
                    )
                copies.append((tensor, copy))
            _history(tensor._local_tensor).add(None)
            _count(tensor)
            if isinstance(tensor._base, DTensor):
                _count(tensor._base)
    return functools.partial(_write_back, func, copies) if copies else None


def _stale(func: Any, tensor: Tensor) -> UnsupportedOperation:
    return refuse(
        func,
        f"it reads a tensor {tuple(tensor.shape)}, which in one process is a view. Here its dims are sharded, so it is"
        f" a copy, and its tensor was changed after the copy was made; accepted: to make it again after the change",
        whole_helps=False,
    )


def check_read(x: DTensor) -> None:
    """Refuses a copy whose tensor has changed; for whoever reads its local tensor without an operator on it."""
    if _read.checked:
        copy = _copied(x._local_tensor)
        if copy is not None and copy.is_stale():
            torch.ops.aten.alias(x)  # this operator is refused, in a line that names that of the program


def _copied(local: Tensor) -> _Copy | None:
    copy: _Copy | None = getattr(local.untyped_storage(), "_distconv_copy", None)
    return copy if copy is None or copy.node in (None, _node()) else None


def _write_back(func: Any, copies: Sequence[tuple[DTensor, _Copy]]) -> None:
    for tensor, copy in copies:
        at: _Copy | None = copy
        new = tensor
        while at is not None and at.write is not None:
            x = at.of()
            if x is None:
                break
            if at.is_stale():
                raise _stale(func, tensor)
            at.write(x, at.whole(new))
            history = _history(x._local_tensor)
            history.add(at.part)
            at.seen = history.now()
            new, at = x, _copied(x._local_tensor)


def _count(x: DTensor) -> None:
    """Lets autograd know where it has kept the local tensor, too; beneath it a change is not counted."""
    if not x._local_tensor.is_inference():
        torch.autograd.graph.increment_version(x._local_tensor)
        for copy in (each() for each in getattr(x._local_tensor.untyped_storage(), _IN_GRAPHS, ())):
            if copy is not None:
                torch.autograd.graph.increment_version(copy)


def follow_changes(x: DTensor, copy: Tensor) -> None:
    """From now on changes of x count as changes of a copy that graphs may have saved, so that backward refuses it."""
    storage = x._local_tensor.untyped_storage()
    copies = [each for each in getattr(storage, _IN_GRAPHS, ()) if each() is not None]
    setattr(storage, _IN_GRAPHS, [*copies, TensorWeakRef(copy)])


@once_in_process
def watch_changes() -> None:
    """Starts to watch every operator that changes a tensor, whether it has a rule or not."""
    hooks.before_operators.append(_check)
    rule(*unruled(_changes_elements))(leave)


@once_in_process
def _watch_reads() -> None:
    """Starts to watch every operator: a tensor has changed, and copies of it may be read."""
    special = {func._schema.name for func in DTensor._op_dispatcher._custom_op_handlers}

    def reads(schema: Any) -> bool:
        return schema.name not in special and any(is_tensor(argument.type) for argument in schema.arguments)

    rule(*unruled(reads))(leave)


_NO_ELEMENTS = {"aten::requires_grad_", "aten::retain_grad", "aten::set_data", "aten::record_stream"}


def _changes_elements(schema: Any) -> bool:
    """Whether an operator changes those of a tensor; what takes lists, as optimizers do, is passed over."""
    func = operator(f"{schema.name.removeprefix('aten::')}.{schema.overload_name}")
    return (
        any(isinstance(a.type, torch.TensorType) and a.alias_info and a.alias_info.is_write for a in schema.arguments)
        and torch.Tag.inplace_view not in func.tags
        and schema.name not in _NO_ELEMENTS
    )
