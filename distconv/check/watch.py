"""Watches every operator of a step on shards, and counts refusals, bytes that are sent, and memory."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.check.collectives import bytes_sent
from distconv.check.findings import LayerTraffic, Refusal
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape
from distconv.tensors.memory import TensorMemory
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation

GRADIENTS = "gradients of parameters"
OUTSIDE = "outside of the model"


class StepWatch(TorchDispatchMode):
    """While it is on, operators on shards that are refused go on with stand-ins, and everything is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = TensorMemory()
        self.refusals: dict[tuple[str, str, bool, str], Refusal] = {}
        self.layers: dict[str, LayerTraffic] = {}
        self.counting = True
        self._names: dict[nn.Module, str] = {}
        self._stack: list[str] = []
        self._kinds: dict[str, str] = {}
        self._nodes: list[int] = []
        self._layer_of: dict[int, str] = {}
        self._passing = False
        self._now: str | None = None
        self._reducing = False
        self.propagates = False  # Set by `shapes_uncounted`.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            if self._passing:  # it was seen: now DTensor has its turn, with this mode on for what is beneath
                self._passing = False
                return NotImplemented
            return self._on_shards(func, args, kwargs)
        if not any(issubclass(kind, FakeTensor) for kind in types) and _is_real(args, kwargs):
            with unset_fake_temporarily():  # such as the ranks of a mesh
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if not self.propagates:
            self.memory.count(result)
        self.sent(bytes_sent(func, args))
        return result

    def _on_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, self._now = self._now, self._layer()
        self._passing = True
        try:
            with self:
                return func(*args, **kwargs)
        except Exception as error:
            return self._stand_in(func, args, kwargs, error)
        finally:
            self._now, self._passing = before, False

    def above_autograd(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> Any:
        """The stand-in result of an operator that failed above autograd, where this mode does not see it."""
        return recorded(self._stand_in(func, args, kwargs, error), args, kwargs)

    def _stand_in(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> Any:
        """The stand-in result of an operator on shards that failed; the failure is noted."""
        of = first_of_ours((*args, *kwargs.values()))
        if of is None:
            raise error
        self._refused(func, error)
        try:
            return stand_in(func, args, kwargs, of)
        except Exception:  # such as a result whose shape depends on numbers
            raise error from None

    def _refused(self, func: Any, error: Exception) -> None:
        kind = "refused" if isinstance(error, UnsupportedOperation) else "fails"
        message = str(error) if kind == "refused" else f"{func}: {type(error).__name__}: {error}"
        found = Refusal(kind, str(func), self._layer(), in_backward(), " ".join(message.split()))
        self.refusals.setdefault((found.operator, found.layer, found.backward, found.message), found)

    def sent(self, count: int) -> None:
        """Counts bytes for the layer that runs."""
        if not count or not self.counting:
            return
        name = GRADIENTS if self._reducing else self._now if self._now is not None else self._layer()
        layer = self.layers.setdefault(name, LayerTraffic(name, self._kinds.get(name, "")))
        if in_backward():
            layer.backward += count
        else:
            layer.forward += count

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """A context in which messages count as gradients of parameters."""
        before, self._reducing = self._reducing, True
        try:
            yield
        finally:
            self._reducing = before

    def entered(self, module: nn.Module, *_: Any) -> None:
        """A module is called; the names are those within the outermost one."""
        if not self._stack:
            self._names = {each: name or type(module).__name__ for name, each in module.named_modules()}
        name = self._names.get(module, type(module).__name__)
        self._kinds[name] = type(module).__name__
        self._stack.append(name)
        self._turn()

    def left(self, module: nn.Module, *_: Any) -> None:
        """The call of a module ended."""
        if self._stack:
            self._stack.pop()
            self._turn()

    def _layer(self) -> str:
        """The layer that runs; in backward the one whose forward made autograd's node."""
        if in_backward():
            node = torch._C._current_autograd_node()
            at = 0 if node is None else bisect.bisect_right(self._nodes, node._sequence_nr() + 1)
            return self._layer_of[self._nodes[at - 1]] if at else OUTSIDE
        # Autograd has made the node of an operator that is seen here, so the node's number is one less.
        return self._note(torch._C._autograd._get_sequence_nr())

    def _turn(self) -> None:
        """Another layer runs: it makes the nodes of autograd from now on."""
        if not in_backward():
            self._note(torch._C._autograd._get_sequence_nr() + 1)

    def _note(self, number: int) -> str:
        """Notes that autograd's nodes from `number` - 1 on belong to the layer that runs, and returns its name."""
        name = self._stack[-1] if self._stack else OUTSIDE
        if not self._nodes or number > self._nodes[-1]:
            self._nodes.append(number)
        self._layer_of[number] = name
        return name


def in_backward() -> bool:
    """Whether autograd runs."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_real(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether tensors are given, all of them with numbers."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return bool(tensors) and not any(isinstance(x, FakeTensor) for x in tensors)


def stand_in(func: Any, args: Sequence[Any], kwargs: dict[str, Any], of: DTensor) -> Any:
    """Zeros of the shapes that the operator's results have in one process, laid out as ``of`` is where they can be.

    Raises what the operator raises in one process: then it is no matter of ranks.
    """
    with unset_fake_temporarily(), torch.no_grad():
        results = func(*tree_map_only(Tensor, _shape_of, args), **tree_map_only(Tensor, _shape_of, kwargs))
    if func._schema.is_mutable and args and isinstance(args[0], Tensor):
        return args[0]
    if not isinstance(results, Tensor | list | tuple):
        raise TypeError(f"{func}: its result depends on the numbers of a tensor")
    return tree_map_only(Tensor, lambda result: _zeros(result, of), results)


def recorded(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A stand-in above autograd: a step's backward goes on through it to the inputs, whose gradients are zeros."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    return tree_map_only(Tensor, lambda own: _Recorded.apply(own, *inputs), result) if inputs else result


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return own

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def _shape_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _zeros(like: Tensor, of: DTensor) -> DTensor:
    mesh, local = of.device_mesh, of._local_tensor
    placements = nearest(mesh, of.placements, of.shape, like.shape)
    zeros = torch.zeros(local_shape(mesh, placements, like.shape), dtype=like.dtype, device=local.device)
    return wrap(zeros, mesh, placements, like.shape)


def nearest(
    mesh: DeviceMesh, placements: Sequence[Placement], before: Sequence[int], after: Sequence[int]
) -> tuple[Placement, ...]:
    """The layout of a result: sharded by the same dims where it has them in the same extent, else whole."""
    return tuple(
        placement
        if isinstance(placement, Shard)
        and placement.dim < min(len(before), len(after))
        and before[placement.dim] == after[placement.dim]
        else Replicate()
        for placement in placements
    )


def first_of_ours(values: Sequence[Any]) -> DTensor | None:
    """The first sharded tensor of our meshes among arguments and lists of them, else the first of any layout."""
    found = [x for x in tree_leaves(values) if isinstance(x, DTensor) and is_ours(x.device_mesh)]
    return next((x for x in found if any(isinstance(p, Shard) for p in x.placements)), found[0] if found else None)
