"""Decides which models run in turn: those that a program names, or all of a script."""

from __future__ import annotations

import dis
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import get_worker_info

from distconv import settings
from distconv.agreement.ledger import finish_comparisons
from distconv.model.call_inputs import Containers
from distconv.model.calls import note_call
from distconv.model.compiled import original
from distconv.model.running import inside
from distconv.model.whole_calls import run_whole
from distconv.private_names import FOLLOWED, IN_TURN, require
from distconv.settings.partition import Partition, read_memory, read_parts
from distconv.tensors import hooks
from distconv.tensors.replacements import when_put_back
from distconv.tensors.user_lines import is_programs
from distconv.turns.call import call_in_turn
from distconv.turns.call_lock import call_lock
from distconv.turns.computation import Choose, Computation, attempted, why_not_in_turn
from distconv.turns.following import choose_chains
from distconv.turns.inputs import is_cut, on_its_device
from distconv.turns.methods import Turning, methods_of_new_modules, turn_methods
from distconv.turns.parts import Parts, parts_of
from distconv.turns.world import thread
from mucudnn.process import print_line

M = TypeVar("M", bound=nn.Module)

TurnPlan = tuple[Partition | Choose, int | None]
"""The parts, or a function that chooses them for each call; and the limit of the parts' tensors in bytes, if any."""

_suspended: ContextVar[bool] = ContextVar("_suspended", default=False)
"""Whether models that this thread calls now are not to run in turn."""

_ANY = Partition((("sample", 2),))
"""Parts that are made where none are named yet: making parts is what lets distconv see calls of modules."""

_turning: weakref.WeakKeyDictionary[nn.Module, tuple[TurnPlan, str]] = weakref.WeakKeyDictionary()
"""The modules that run in turn where they are called outermost, each with where its results are to be: a value of the
setting `results`."""

Before = Callable[[nn.Module, Any, Any, Partition], None]
"""Called before a call is computed: with the module, its arguments, and the parts."""

_script: list[tuple[TurnPlan, Before | None, DeviceMesh | None]] = []
"""The plan of the running script, if there is one, a function that is called before each call, and the job's ranks."""


def turn(model: M, plan: TurnPlan, results: str | None, what: str) -> M:
    """Lets each outermost call of a model be computed by a plan; ``results`` as of `distconv.in_turn`. ``what``: the
    name of the caller's function, for errors.

    Raises:
        RuntimeError: one line, in a job of several ranks.
        TypeError: one line, for something else than a model.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"{what} in a job of several ranks; accepted: one process, distconv.parallelize, or"
            " distconv run --partition ... with --parts ... or --memory ..., of each rank"
        )
    for module in original(model).modules():
        _turning[module] = plan, settings.value("results", results)
        turn_methods(type(module), _OF_METHODS)
    _watch_calls(plan[0])
    return model


def read_plan(parts: str, memory: str | float | None) -> tuple[Partition, int | None]:
    """The parts and the limit of their memory, in bytes. ValueError, one line, for what is not accepted."""
    require(IN_TURN, *((FOLLOWED,) if memory is not None else ()))
    return read_parts(parts), read_memory(memory)


@contextmanager
def script_in_turn(plan: TurnPlan, before: Before | None = None, ranks: DeviceMesh | None = None) -> Iterator[None]:
    """A context in which every model whose inputs can be cut runs in turn.

    ``before``: is called before each such call. ``ranks``: the mesh of all ranks of a job, which run the same script
    and have as many parts each; every rank must call this.
    """
    _watch_calls(plan[0], ranks)
    _script.append((plan, before, ranks))
    try:
        with methods_of_new_modules(_OF_METHODS):
            yield
        if ranks is not None:
            finish_comparisons(ranks)
    finally:
        _script.pop()


@contextmanager
def not_in_turn() -> Iterator[None]:
    """A context in which this thread calls no model in turn."""
    before = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(before)


def _watch_calls(how: Partition | Choose, ranks: DeviceMesh | None = None) -> None:
    """Makes the parts, and lets calls of modules run in turn from now on."""
    partition = how if isinstance(how, Partition) else _ANY
    if ranks is not None and isinstance(how, Partition):
        parts_of(partition, ranks.device_type, ranks)
    elif ranks is None and partition.ranks > 1:
        parts_of(partition, "cpu")
    if _called not in hooks.model_calls:
        hooks.model_calls.append(_called)
        when_put_back(_forget_modules)


def _forget_modules() -> None:
    """No module runs in turn any more."""
    hooks.model_calls.remove(_called)
    _turning.clear()


def _plan_of(module: nn.Module) -> TurnPlan | None:
    """The plan by which calls of a module run in turn; None where they do not."""
    is_loader = get_worker_info() is not None
    if thread.part is not None or inside.whole or is_loader or _suspended.get():
        return None
    of_script, _, ranks = _script[-1] if _script else (None, None, None)
    plan = _turning[module][0] if module in _turning else of_script
    is_whole = plan is not None and isinstance(plan[0], Partition) and plan[0].ranks == 1 and ranks is None
    return None if is_whole else plan


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The result of a module's call in turn; NotImplemented where it does not run so."""
    plan = _plan_of(module)
    if plan is None:
        return NotImplemented
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = next(itertools.chain(module.parameters(), module.buffers(), leaves), None)
    if first is None:
        return NotImplemented  # it computes nothing
    chooses_on_ranks = bool(_script) and _script[-1][2] is not None and not isinstance(plan[0], Partition)
    why = why_not_in_turn(module, leaves, chooses_on_ranks)
    how, memory = plan
    if why:
        _report(module, why, option="--parts" if isinstance(how, Partition) else "--memory")
        return NotImplemented
    on_host = (_turning[module][1] if module in _turning else settings.value("results")) == "host"
    compute = functools.partial(_computed, module, args, kwargs, leaves, first.device, on_host)
    if isinstance(how, Partition):
        return compute(Computation(how, memory))
    if torch._C._current_graph_task_id() != -1:
        return compute(Computation())  # in backward a checkpoint calls again what ran whole
    with not_in_turn():
        computation = how(module, args, kwargs, leaves, first.device.type)
    with computation.within():
        result = attempted(compute, computation, module, args, kwargs)
    if computation.ended is not None:
        computation.ended(result)
    return result


def _computed(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    leaves: Sequence[Tensor],
    device: torch.device,
    on_host: bool,
    computation: Computation,
) -> Any:
    partition, memory, call, *_ = computation
    _, before, ranks = _script[-1] if _script else (None, None, None)
    if partition is None and ranks is not None:
        if call is None:
            return NotImplemented  # the ranks' own call
        with not_in_turn():
            return call(module, *args, **kwargs)
    if partition is None:
        there = tree_map_only(Tensor, lambda x: on_its_device(x, device), (args, kwargs))
        containers = Containers((args, kwargs), there)
        with call_lock.shared():
            result = run_whole(call or nn.Module.__call__, module, *there)
        containers.give_back()
        return tree_map_only(Tensor, Tensor.cpu, result) if on_host else result
    parts = parts_of(partition, device.type, ranks)
    try:
        if not is_cut(parts, leaves):
            _report(module, f"none of its inputs has a dim of {partition}")
            return NotImplemented
    except ValueError as error:
        why = str(error).partition("; or a strategy")[0]  # parts in turn have none
        if module in _turning:
            raise ValueError(why) from None
        _report(module, why)
        return NotImplemented
    if before is not None:
        with not_in_turn():
            before(module, args, kwargs, partition)
    try:
        with call_lock.taken():
            return _in_turn(parts, memory, module, args, kwargs, on_host, computation)
    except Exception as error:
        if not (_is_of_script(error) or (ranks is None and _is_raised_by_script(error))):
            raise
        ended = type(error).__name__  # The program may catch it and go on with what hooks have kept.
    _report(module, f"it ends by {ended}, an exception of the program")
    with not_in_turn():
        return nn.Module.__call__(module, *args, **kwargs) if call is None else call(module, *args, **kwargs)


def _is_of_script(error: Exception) -> bool:
    """Whether an exception is of a class of the program, such as one by which a hook ends a call."""
    defined_in = type(error).__module__.partition(".")[0]
    return type(error) is Exception or defined_in not in ("builtins", "distconv", "mucudnn", "torch", "numpy")


def _is_raised_by_script(error: Exception) -> bool:
    """Whether a statement of the program has raised an exception, of whatever class, in this process."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    if entry is None:
        return False
    code = entry.tb_frame.f_code
    return is_programs(code.co_filename) and code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _in_turn(
    parts: Parts, memory: int | None, module: nn.Module, args: Any, kwargs: Any, on_host: bool, computation: Computation
) -> Any:
    fault, ranks = "", parts.ranks
    if ranks is not None:
        note_call(module, ranks, args, kwargs)
        if hooks.scripts and settings.value("shard_parameters"):
            hooks.scripts[-1].assignments(module)  # this shards the module's parameters
    elif torch._C._current_graph_task_id() == -1:  # not in backward, where a checkpoint computes something again
        fault = _choose_chains(module, args, kwargs, parts.partition)
    again = computation.again and computation.again(module, args, kwargs)
    result = call_in_turn(parts, memory, module, args, kwargs, on_host, computation.call, again)
    if fault:  # of following alone: the call itself has raised none
        _report(module, fault, "could not be followed, and its chains are chosen after a call")
    return result


def _choose_chains(module: nn.Module, args: Any, kwargs: Any, partition: Partition) -> str:
    """Follows a call to choose its chains, and returns the error of that as text; empty if there is none.

    A call that asks for numbers cannot be followed, which is no error: its chains are chosen after it was computed.
    """
    try:
        choose_chains(module, args, kwargs, partition)
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


_OF_METHODS = Turning(lambda module: _plan_of(module) is not None, _called)

_reported: set[tuple[str, str]] = set()


def _report(module: nn.Module, why: str, what: str = "", option: str = "--parts") -> None:
    what = what or ("runs without parts" if hooks.scripts else "runs whole")
    key = type(module).__name__, what
    if key not in _reported:
        _reported.add(key)
        print_line(f"distconv: {option}: {key[0]} {what}: {why}")
