"""Distributes a model, or all models of a script: their calls run on shards, under one partition or one per layer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distconv import settings
from distconv.agreement.ledger import before_step, finish_comparisons, ledger, note_state, settle
from distconv.model import automatic, parameters
from distconv.model.calls import assigned, call
from distconv.model.checkpoint import saving_whole
from distconv.model.compiled import original
from distconv.model.direct import import_paths
from distconv.model.direct.activation import open_functions
from distconv.model.direct.checkpoints import open_checkpoints
from distconv.model.gradient_inputs import open_gradients
from distconv.model.model_modules import Assignment, assignments
from distconv.model.new_tensors import open_new_tensors
from distconv.model.outermost_calls import loaded
from distconv.model.parameters import has_substitutes
from distconv.model.replacement import open_replacement
from distconv.model.running import adopt_parameters, within_this_run
from distconv.model.shard_gather import to_shards
from distconv.model.strategy import Strategy
from distconv.model.traces import call_scripted_functions_in_python, watch_traces
from distconv.model.transforms import transforms_of_whole_tensors
from distconv.model.whole_calls import graphs_of_whole_models, run_whole_in_forked_processes
from distconv.private_names import COMPILED, lacks
from distconv.reading.array import LazyArray
from distconv.reading.opening import identity, read_shard
from distconv.rules.registry import install_rules, watch_plain_tensors
from distconv.tensors import hooks
from distconv.tensors.gathering.record import record
from distconv.tensors.mesh import MeshToChoose, adopt, batch_norm_statistics, is_ours, usable_mesh, whole_group
from distconv.tensors.plain_tensors import as_before, mix_plain_tensors, plain
from distconv.tensors.replacements import in_place_of, replace, until_put_back, when_put_back
from distconv.tensors.untraced import untraced

M = TypeVar("M", bound=nn.Module)


def shard(x: Tensor | LazyArray, mesh: DeviceMesh | MeshToChoose) -> DTensor:
    """This rank's part of a tensor, as a DTensor. Differentiable.

    Forward sends nothing; backward gathers the gradient of the whole tensor.

    Args:
        x: the whole tensor (N, C, spatial...), the same on every rank; a DTensor is returned as it is. Of an array of
            `distconv.open` this rank's part is read, and nothing else.
        mesh: of `distconv.init`.

    Raises:
        ValueError: where the partition has an axis that the data lacks.
    """
    if isinstance(x, DTensor):
        return x
    mesh = usable_mesh(mesh)
    enable(mesh)
    noted = ledger(mesh)
    if isinstance(x, LazyArray):
        if noted is not None:
            noted.note("what is read for distconv.shard", identity(x))
            noted.due = True
        return read_shard(x, mesh)
    x = plain(x)
    if noted is not None:
        noted.note("the tensor given to distconv.shard", x)
        noted.due = True
    return to_shards(x, mesh)


_mixing: set[torch.device] = set()  # The devices whose backward thread mixes plain tensors with DTensors.


def mix_in_backward(device: torch.device) -> None:
    """The same as `mix_plain_tensors`, in the thread in which autograd runs the backward of a GPU; once for each.

    The switch belongs to a thread. The caller may be under `no_grad`, `inference_mode`, or in autograd's own thread.
    """
    if device in _mixing:
        return
    _switch_in_backward(device, mix_plain_tensors)
    _mixing.add(device)
    when_put_back(lambda: _switch_in_backward(device, as_before))
    when_put_back(_mixing.clear)


def _switch_in_backward(device: torch.device, switch: Callable[[], None]) -> None:
    threads = torch.autograd.set_multithreading_enabled(True)
    with torch.inference_mode(False), torch.enable_grad(), threads:
        x = torch.zeros((), device=device, requires_grad=True).clone()
        x.register_hook(lambda _: switch())  # called in the thread that runs the node of x
        x.backward()


def enable(mesh: DeviceMesh, batch_norm: str | None = None) -> None:
    """From now on outermost calls of modules run distributed, and plain tensors beside DTensors count as replicated."""
    if batch_norm not in (None, "global", "local"):
        raise ValueError(f"batch_norm {batch_norm!r}: accepted: global, local")
    if not is_ours(mesh):
        adopt(mesh)
    batch_norm_statistics[mesh] = batch_norm or batch_norm_statistics.get(mesh, "global")
    _look_at_calls()
    install_rules()
    watch_plain_tensors()
    import_paths()
    open_functions()
    open_gradients()
    call_scripted_functions_in_python()
    open_checkpoints(within_this_run)
    open_new_tensors()
    open_replacement()
    adopt_parameters()
    mix_plain_tensors()
    if mesh.device_type == "cuda":
        mix_in_backward(torch.device("cuda", torch.cuda.current_device()))


@until_put_back
def _look_at_calls() -> None:
    """Modules run distributed, and what the ranks must agree on is compared."""
    if not lacks(COMPILED):
        watch_traces()
    run_whole_in_forked_processes()
    replace(nn.Module, "__call__", call)
    replace(nn.Module, "load_state_dict", in_place_of(nn.Module.load_state_dict, _load_state_dict))
    for hook in (parameters.step_on_current, before_step, record.count_step):
        when_put_back(register_optimizer_step_pre_hook(untraced(hook)).remove)
    hooks.after_whole_reads.append(settle)
    when_put_back(lambda: hooks.after_whole_reads.remove(settle))
    when_put_back(assigned.clear)


def _load_state_dict(load: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    result = load(module, *args, **kwargs)
    loaded.update(module.modules())
    return result


def parallelize(
    model: M,
    mesh: DeviceMesh | MeshToChoose,
    strategy: Mapping[str, str] | Strategy | str | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    batch_norm: str = "global",
    shard_parameters: bool | None = None,
    sample_input: Tensor | LazyArray | Sequence[int] | Sequence[Tensor | Sequence[int]] | None = None,
) -> M:
    """Lets a model run on shards: its plain inputs are sharded, and its outputs are DTensors on the mesh.

    Parameters and buffers become equal on every rank: the first rank's are copied to the others once, here. Where the
    mesh splits channels, the parameters that its axes shard become DTensors, of which a rank has its part: make the
    optimizer afterwards. After backward, gradients are reduced over the ranks.

    Args:
        model: is changed in place. One without parameters, such as a blur, is cut where it is named here; others run
            whole where all their inputs are plain tensors.
        mesh: of `distconv.init`, or any DeviceMesh, also a slice.
        axes: {name of an axis of the mesh: what it shards}, such as {"sp": "height"}; others are left to the program.
        strategy: {pattern of layer names: partition}, for layers that run under other partitions of the same ranks; the
            first pattern that matches decides. What goes between such layers is redistributed. Or "auto": one is chosen
            by predicted steps for a whole input like ``sample_input``, by the first rank in a process of its own, and
            is kept for the next start. It decides on the mesh of `init("auto")`, too.
        batch_norm: "global" takes statistics over the whole batch, as one process would; "local" over each rank's part.
        shard_parameters: as `--shard-parameters` of `distconv run`; if not given, as `DISTCONV_SHARD_PARAMETERS` says.
        sample_input: for "auto", a whole input (N, C, spatial...), or its shape; of a model with several inputs, a list
            of them. Nothing is read of it.

    Returns:
        The same model.

    Raises:
        TypeError: one line, for what is no model or no mesh.
        ValueError: one line, for a pattern that decides on no layer, another number of ranks, or where none is chosen.
    """
    whole, model = model, original(model)  # type: ignore[assignment]
    if strategy == settings.AUTO:
        mesh, strategy, shard_parameters = automatic.choose(model, mesh, sample_input, batch_norm, shard_parameters)
    elif isinstance(strategy, str):
        raise ValueError(f"strategy {strategy!r}: accepted: {settings.AUTO}, or patterns of layer names and partitions")
    mesh = usable_mesh(mesh, axes)
    enable(mesh, batch_norm)
    if strategy is not None and not isinstance(strategy, Strategy):
        strategy = Strategy.parse(strategy, mesh.size())
    if strategy is not None:
        strategy.check({pattern for pattern, _ in strategy.assign(model).values()}, [model])
    found = assignments(model, mesh, strategy)
    for other in {assignment.mesh for assignment in found.values()}:
        enable(other, batch_norm)
    _equalize(model, mesh)
    parameters.shard_parameters(found, settings.value("shard_parameters", shard_parameters))
    assigned.update(found)
    return whole


def _equalize(model: nn.Module, mesh: DeviceMesh) -> None:
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, DTensor)]
    if mesh.size() == 1 or not tensors:
        return
    group, source = whole_group(mesh), int(mesh.mesh.flatten()[0])
    for tensor in tensors:
        dist.broadcast(tensor.detach(), source, group=group)


class _Script:
    """The meshes of a script's modules, found at the first outermost call of each model."""

    def __init__(self, mesh: DeviceMesh, strategy: Strategy | None, batch_norm: str) -> None:
        self.mesh, self.strategy, self.batch_norm = mesh, strategy, batch_norm
        self._assignments: weakref.WeakKeyDictionary[nn.Module, Assignment] = weakref.WeakKeyDictionary()
        self._outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._to_shard: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules that were called with other tensors in place of their parameters, which are still to be sharded."""
        self._used: set[str] = set()

    def assignments(self, module: nn.Module) -> Mapping[nn.Module, Assignment]:
        if module not in self._assignments or (module in self._to_shard and not has_substitutes(module)):
            found = assignments(module, self.mesh, self.strategy)
            note_state(module, self.mesh)
            for mesh in {assignment.mesh for assignment in found.values()}:
                enable(mesh, self.batch_norm)
            parameters.shard_parameters(found, settings.value("shard_parameters"))
            (self._to_shard.add if has_substitutes(module) else self._to_shard.discard)(module)
            self._assignments.update(found)
            self._outermost.add(module)
            if self.strategy:
                self._used |= {pattern for pattern, _ in self.strategy.assign(module).values()}
        return self._assignments

    def check(self, *_: Any) -> None:
        """ValueError for a pattern of the strategy that decides on no layer of the models called so far."""
        if self.strategy:
            self.strategy.check(self._used, list(self._outermost))


@contextlib.contextmanager
def distributed_script(
    mesh: DeviceMesh | MeshToChoose, strategy: Strategy | None = None, *, batch_norm: str = "global"
) -> Iterator[None]:
    """A context in which outermost calls of modules with parameters run distributed; plain tensors mix with DTensors.

    This is what `distconv run` puts around a script. Where the mesh splits channels, a model's parameters are sharded
    at its first call, and optimizers that were made earlier follow.

    Args:
        mesh: of `distconv.init`.
        strategy: layers that run under other partitions; their names are those within the module of an outermost call.
        batch_norm: "global" takes statistics over the whole batch, as one process would; "local" over each rank's part.

    Raises:
        ValueError: one line, at the first step of an optimizer or else at the end, for a pattern of the strategy that
            decides on no layer.
    """
    mesh = usable_mesh(mesh)
    enable(mesh, batch_norm)
    script = _Script(mesh, strategy, batch_norm)
    hooks.scripts.append(script)
    hook = register_optimizer_step_pre_hook(untraced(script.check))
    try:
        with saving_whole(), graphs_of_whole_models(), transforms_of_whole_tensors():
            yield
            finish_comparisons(mesh)
        script.check()
    finally:
        hook.remove()
        hooks.scripts.pop()
