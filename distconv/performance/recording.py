"""Records a step as the program itself takes it, on tensors without data, in a job whose other ranks do not exist.

The rules, plans and buckets are those of a real run. So the recorded operations, and the order in which messages start
and are waited for, are those of a real rank.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distconv.model.fully_sharded import some_fully_sharded
from distconv.model.gradients import Bucket
from distconv.model.parallelize import enable, parallelize
from distconv.model.parameter_gathers import Gathers, Regathered
from distconv.model.strategy import Strategy
from distconv.performance.events import Event, Operator, RecordedStep, Start, Wait
from distconv.performance.without_data import empty_shard, made_without_data
from distconv.tensors.dtensors import local_of, wrap
from distconv.transfer import group_calls
from mucudnn.networks import without_data
from mucudnn.process import substituted


def record_step(
    model: nn.Module,
    mesh: DeviceMesh,
    *shapes: Sequence[int],
    strategy: Mapping[str, str] | Strategy | None = None,
    batch_norm: str = "global",
    wants_gradient: bool = False,
    trains: bool = True,
) -> RecordedStep:
    """Forward and backward of a model on the meta device, on this rank of an imagined job.

    Args:
        model: on the meta device; it is copied.
        shapes: of the whole inputs, (N, C, spatial...).
        strategy: as for `parallelize`.
        wants_gradient: whether the gradients of inputs are computed, as for a layer within a network.
        trains: False for inference: the model's call alone, in `eval`.

    Raises:
        UnsupportedOperation, ValueError, RuntimeError: what a real run raises.
    """
    model = copy.deepcopy(model).train(trains)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with _messages() as messages:
        if next(iter(model.parameters()), None) is None:
            enable(mesh, batch_norm)
        else:
            parallelize(model, mesh, strategy, batch_norm=batch_norm)
        inputs = [empty_shard(mesh, shape, dtype).requires_grad_(wants_gradient) for shape in shapes]
        parameters = {_storage(p): local_of(p).nbytes for p in model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            local = local_of(tensor)
            if _storage(tensor) not in parameters:
                saved[_storage(tensor)] = local.untyped_storage().nbytes()
            return tensor

        pack = Gathers._pack

        def packed(gathers: Gathers, tensor: Tensor) -> Callable[[], Tensor]:
            """Records nothing for gathered parameters."""
            found = pack(gathers, tensor)
            if not isinstance(found, Regathered):
                keep(tensor)
            return found

        hooks = (keep, lambda tensor: tensor) if not some_fully_sharded(model.parameters()) else None
        # The first step makes plans, for which it asks torch about whole shapes; the second is as all that follow.
        for mode in (_Planning(), _Kernels(messages.events)):
            messages.events.clear()
            saved.clear()
            entered = [_Entrance.apply(x) if wants_gradient else x for x in inputs]
            with mode, torch.set_grad_enabled(trains):
                saving = torch.autograd.graph.saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext()
                with saving, substituted(Gathers, _pack=packed):
                    result = model(*entered)
                outputs = [y for y in tree_leaves(result) if isinstance(y, Tensor) and y.requires_grad]
                torch.autograd.backward(outputs, [_like(y) for y in outputs])
    sizes = parameters.values()
    return RecordedStep(tuple(messages.events), dist.get_rank(), sum(saved.values()), sum(sizes), len(sizes))


class _Entrance(torch.autograd.Function):
    """The input of a layer within a network: the result of another, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return wrap(x._local_tensor, x.device_mesh, x.placements, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _like(y: Tensor) -> Tensor:
    if not isinstance(y, DTensor):
        return torch.empty_like(y)
    return wrap(torch.empty_like(y._local_tensor), y.device_mesh, y.placements, y.shape)


def _storage(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage()._cdata


_COLLECTIVES = {
    "all_to_all_single": ("all_to_all", 1),
    "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),  # the same, by the name that it has since torch 2.13
    "all_gather": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
}
"""By function of torch.distributed: the kind of its events, and the place of the argument whose bytes count."""


class _Messages:
    """A stand-in for torch.distributed: it records each collective and leaves its output as it is."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.of_gradients = False  # A bucket is being summed.
        self._numbers = itertools.count()

    def start(self, kind: str, group: Any, size: int, sent: Sequence[int], async_op: bool) -> _Work | None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
        if len(ranks) == 1:
            return _Work(self.events, None) if async_op else None
        number = next(self._numbers)
        self.events.append(Start(number, kind, ranks, size, tuple(sent)))
        work = _Work(self.events, number)
        if async_op:
            return work
        work.wait()
        return None

    def noting(self, function: Callable[..., Any]) -> Callable[..., _Work | None]:
        """The substitute of a function of torch.distributed, or of `group_calls`, which only begins a collective."""
        kind, place = _COLLECTIVES[function.__name__]
        signature, begins = inspect.signature(function), function in group_calls.FUNCTIONS

        def collective(*args: Any, **kwargs: Any) -> _Work | None:
            given = signature.bind(*args, **kwargs).arguments
            counted = tree_leaves(list(given.values())[place])
            counts = given.get("sent") or given.get("input_split_sizes") or ()
            sent = [count * counted[0].element_size() for count in counts]
            name = "gradients" if kind == "all_reduce" and self.of_gradients else kind
            size = sum(x.nbytes for x in counted)
            return self.start(name, given.get("group"), size, sent, given.get("async_op", begins))

        return collective


class _Work:
    def __init__(self, events: list[Event], number: int | None) -> None:
        self._events, self._number = events, number

    def wait(self) -> bool:
        if self._number is not None:
            self._events.append(Wait(self._number))
            self._number = None
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def _messages() -> Iterator[_Messages]:
    messages = _Messages()
    noting = {name: messages.noting(getattr(dist, name)) for name in _COLLECTIVES if hasattr(dist, name)}
    own = {function.__name__: messages.noting(function) for function in group_calls.FUNCTIONS}
    start = Bucket.start

    def noted(bucket: Bucket) -> None:
        messages.of_gradients = True
        try:
            start(bucket)
        finally:
            messages.of_gradients = False

    with substituted(dist, **noting), substituted(group_calls, **own), substituted(Bucket, start=noted):
        yield messages


class _Planning(TorchDispatchMode):
    """Notes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        return made_without_data(func, args, kwargs or {})[0]


class _Kernels(TorchDispatchMode):
    """Notes the program's operators and the kernels of this rank."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            self.events.append(Operator())
            return NotImplemented  # what the rule does is dispatched here again
        result, kernel = made_without_data(func, args, kwargs or {})
        if kernel is not None:
            self.events.append(kernel)
        return result


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A module made without data. NotFound for what makes something else."""
    with torch.device("meta"):
        return without_data(build)
