"""A run: the state of an outermost call of a model, such as its meshes and the tensors that represent its parameters.

`torch.utils.checkpoint` recomputes in backward, long after the call has ended. It recomputes in the same run: with the
same tensors for parameters, on the same meshes, by the same paths.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map_only

from distconv import settings
from distconv.model.direct.activation import from_dtensor
from distconv.model.direct.parameters import in_use
from distconv.model.direct.paths import running
from distconv.model.model_modules import Assignment, modules_of, parameters_of
from distconv.model.results import OnOneMesh
from distconv.model.uses import Uses
from distconv.rules.normalization.running import waiting
from distconv.tensors.debug import ShownLayouts
from distconv.tensors.gathering.record import model_call
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import until_put_back, when_put_back


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


inside = _Thread()  # The outermost call that runs now, if any.


def new_run(
    model: nn.Module, assignments: Mapping[nn.Module, Assignment], mesh: DeviceMesh, direct: bool, several: bool = False
) -> Run:
    """The run of an outermost call of a model. ``several``: whether its modules run on several meshes."""
    modules = modules_of(model)
    uses = Uses(model, *parameters_of(modules, assignments if several else {}, mesh), direct)
    return Run(assignments, mesh, modules, uses, direct, several)


@contextlib.contextmanager
def within_run(run: Run) -> Iterator[None]:
    """A context in which a run is the current one. Collective at its end, where running statistics are written."""
    outer = inside.run, running.uses
    inside.run, running.uses = run, run.uses
    one_mesh = OnOneMesh(lambda: run.mesh) if run.several else contextlib.nullcontext()
    saving = contextlib.nullcontext() if run.uses.gathers is None else run.uses.gathers.saving()
    shown = ShownLayouts() if settings.value("debug") == "layouts" else contextlib.nullcontext()
    try:
        with model_call(), in_use(run.uses.parameters), inside.watch(), waiting(run.modules), one_mesh, saving, shown:
            yield
            run.uses.end()
    finally:
        inside.run, running.uses = outer


@until_put_back
def adopt_parameters() -> None:
    """Makes parameters that a model registers while it runs part of the current run, from now on."""

    def adopt(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        run = inside.run
        if run is not None and parameter is not None:
            run.uses.adopt(parameter, run.mesh)

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
