"""A run: the state of an outermost call of a model, such as its meshes and the tensors that represent its parameters.

Of its results the script gets small ones as plain tensors, others distributed (see `for_caller`).

`torch.utils.checkpoint` recomputes in backward, long after the call has ended. It recomputes in the same run: with the
same tensors for parameters, on the same meshes, by the same paths.

On a small tensor, an operator on shards costs the host more than the operator itself. So a result of a few KiB is
gathered once, and what the script computes from it, such as its loss, is stock torch on every rank. If ranks then do
different things, as with different targets, their gradients of the result differ; these are compared. Results stay
distributed on GPUs, where kernels that add up in an order of their own would give each rank another gradient. They also
stay distributed if the model was given distributed tensors: its targets are likely to be distributed as well.

If a function combines tensors of different meshes, as in models on several, they are redistributed to one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from distconv import settings
from distconv.agreement.ledger import ledger, settle
from distconv.model.direct.activation import from_dtensor
from distconv.model.direct.parameters import enter, in_use, is_own
from distconv.model.direct.paths import is_in_place, running
from distconv.model.model_modules import Assignment, modules_of, parameters_of, parameters_of_fsdp
from distconv.model.shard_gather import cut, gather, whole
from distconv.model.uses import Uses
from distconv.rules.normalization.running import waiting
from distconv.tensors.arguments import each_of
from distconv.tensors.autograd_nodes import GIVEN_RESULTS
from distconv.tensors.debug import ShownLayouts
from distconv.tensors.gathering.record import model_call
from distconv.tensors.layouts import added_up
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import until_put_back, when_put_back
from distconv.transfer.redistribution import redistributed


@dataclass
class Run:
    """The state of an outermost call."""

    assignments: Mapping[nn.Module, Assignment]
    mesh: DeviceMesh  # The mesh of the module that runs now.
    modules: Sequence[nn.Module]  # The called module, and all within it.
    uses: Uses  # Maps parameters to the tensors that functions get in their place.
    direct: bool  # Whether functions may take direct paths (`distconv.model.direct`).
    several: bool  # Whether the modules run on several meshes.


class _Thread(threading.local):
    run: Run | None = None
    watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """A context for whatever observes the functions of a model; also entered where backward recomputes some."""
    whole: bool = False  # Whether the model that runs is computed whole on every rank.
    refused: Exception | None = None  # What a call in parts ends with, even if the model catches other errors.
    others: Sequence[Tensor] = ()  # Parameters of none of the model's modules, whose gradients go the way of theirs.


inside = _Thread()  # The outermost call that runs now, if any.


def new_run(
    model: nn.Module, assignments: Mapping[nn.Module, Assignment], mesh: DeviceMesh, direct: bool, several: bool = False
) -> Run:
    """The run of an outermost call of a model. ``several``: whether its modules run on several meshes."""
    modules = modules_of(model)
    uses = Uses(
        model, *parameters_of(modules, assignments if several else {}, mesh), direct, parameters_of_fsdp(modules)
    )
    uses.include(inside.others, mesh)
    return Run(assignments, mesh, modules, uses, direct, several)


@contextlib.contextmanager
def within_run(run: Run) -> Iterator[None]:
    """A context in which a run is the current one. Collective at its end, where running statistics are written."""
    outer = inside.run, running.uses
    inside.run, running.uses = run, run.uses
    one_mesh = OnOneMesh(lambda: run.mesh) if run.several else contextlib.nullcontext()
    saving = contextlib.nullcontext() if run.uses.gathers is None else run.uses.gathers.saving()
    may_go_on = inside.watch is contextlib.nullcontext  # behind an error; parts do not
    statistics = waiting(run.modules, may_go_on)
    shown = ShownLayouts() if settings.value("debug") == "layouts" else contextlib.nullcontext()
    try:
        with model_call(), in_use(run.uses.parameters), inside.watch(), statistics, one_mesh, saving, shown:
            yield
            run.uses.end()
    finally:
        inside.run, running.uses = outer


@until_put_back
def adopt_parameters() -> None:
    """Makes parameters that a model registers while it runs part of the current run, from now on."""

    def adopt(module: nn.Module, name: str, parameter: Any) -> None:
        run = inside.run
        if run is not None and type(parameter) in (nn.Parameter, DTensor):
            for new in run.uses.include([parameter], run.mesh):
                enter(new)

    when_put_back(register_module_parameter_registration_hook(adopt).remove)


def as_direct(values: Any) -> Any:
    """Values with an activation in place of each DTensor on a mesh of ours."""
    return tree_map_only(
        DTensor, lambda x: from_dtensor(x) if type(x) is DTensor and is_ours(x.device_mesh) else x, values
    )


def within_this_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes in the run that is current now, whenever it is called."""
    if inside.run is None:
        return function
    run = replace(inside.run)  # a copy: the mesh and assignments of a run change from module to module

    @functools.wraps(function)
    def computed(*args: Any) -> Any:
        with within_run(run):
            return function(*(as_direct(args) if run.direct else args))

    return computed


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
