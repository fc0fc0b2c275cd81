"""Which rule runs for which operator, and what DTensor may do where there is none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from distconv.layouts import undoes_shard
from distconv.partition import is_ours
from distconv.refusal import UnsupportedOperation, refuse

H = TypeVar("H", bound=Callable[..., Any])


checks: list[Callable[[Any, Sequence[Any], dict[str, Any]], None]] = []
"""Each is called with (operator, args, kwargs) before a rule and raises where the operator is refused."""


registered: set[str] = set()
"""The operators that have a rule."""


def rule(*operators: str) -> Callable[[H], H]:
    """Register ``handler(func, *args, **kwargs)`` for the named operators on DTensors of our meshes."""

    def register(handler: H) -> H:
        def dispatch(cls: type, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
            if not _on_our_mesh(args):
                return leave(func, args, kwargs or {})
            for check in checks:
                check(func, args, kwargs or {})
            return handler(func, *args, **(kwargs or {}))

        for operator in operators:
            torch.library.register_torch_dispatch(operator, DTensor, dispatch)
            registered.add(operator)
        return handler

    return register


def discover() -> None:
    """Imports every module of `distconv.rules`, which registers its rules; then takes apart what has none.

    Operators that torch makes of others, autograd takes apart before they reach a DTensor. In inference mode there is
    no autograd, and the rule that is registered here for each of them does it.
    """
    package = "distconv.rules"
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
    made_of_others = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    rule(
        *(
            name
            for name in made_of_others
            if name.startswith("aten::") and not name.endswith("out") and name not in registered
        )
    )(_taken_apart)


def _taken_apart(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operators that it is made of give, each by its own rule."""
    return func.decompose(*args, **kwargs)


def _on_our_mesh(args: Sequence[Any]) -> bool:
    """Whether the first DTensor, found in lists too, lies on one of our meshes; a program may use others for itself."""
    for arg in args:
        if isinstance(arg, DTensor):
            return is_ours(arg.device_mesh)
        if isinstance(arg, list | tuple) and any(isinstance(item, DTensor) for item in arg):
            return _on_our_mesh(arg)
    return True


def leave(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What DTensor does with an operator where distconv has nothing to say."""
    special = DTensor._op_dispatcher._custom_op_handlers.get(func)
    if special is not None:
        return special(func, tuple(args), kwargs)
    parts = func.decompose(*args, **kwargs)
    if parts is not NotImplemented:
        return parts
    result = stock(func, args, kwargs)
    if func._schema.name.endswith("_"):
        return args[0]
    outputs = [kwargs[argument.name] for argument in func._schema.arguments if argument.is_out]
    for output, computed in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
        output._spec = computed._spec
    return result if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)


def stock(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """DTensor's own behaviour of an operator that has a rule here; what would gather a shard is refused."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(func, tuple(args), kwargs or {})
    dispatcher.sharding_propagator.propagate(info)
    assert info.output_sharding is not None
    spec: Any = info.output_sharding.output_spec
    if func._schema.name.endswith("_") and isinstance(spec, DTensorSpec) and spec.placements != args[0].placements:
        raise refuse(func, f"in place on {args[0].placements}, what it computes would be laid out as {spec.placements}")
    results = dispatcher._dispatch_get_local_results_slow_path(func, tuple(args), info)
    return dispatcher.wrap(results, spec)


def install_guard() -> None:
    """Make every silent gather of a shard on one of our meshes an ``UnsupportedOperation``, before it communicates."""
    dispatcher = DTensor._op_dispatcher
    redistribute = dispatcher.redistribute_local_args
    if getattr(redistribute, "refuses_gathers", False):
        return

    def guarded(op_info: Any, suggested: Any, *rest: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(suggested.args_schema)
        for before, after in zip(op_info.flat_args_schema, leaves, strict=False):
            if not (isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec) and is_ours(before.mesh)):
                continue
            # A replicated tensor becomes a partial sum without communication, so that sums can be added late.
            pairs = zip(before.placements, after.placements, strict=True)
            target = [b if b.is_replicate() and a.is_partial("sum") else a for b, a in pairs]
            if undoes_shard(before.mesh, before.placements, target):
                raise UnsupportedOperation(
                    f"{suggested.op}: no rule runs it on a tensor {tuple(before.shape)} laid out as"
                    f" {before.placements}; DTensor would gather it to {after.placements}."
                    f" Use distconv.gather first where that is meant"
                )
        redistribute(op_info, suggested, *rest)

    guarded.refuses_gathers = True  # type: ignore[attr-defined]
    dispatcher.redistribute_local_args = guarded  # type: ignore[assignment,method-assign]
