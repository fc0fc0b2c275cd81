"""Registry: which rule runs for which operator, and what DTensor may do where there is none.

Rules are for DTensors on meshes that distconv made or adopted. On a program's other DTensors every operator does what
it does without distconv.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from distconv.rules.beneath import refuse_nested_tensors, refuse_operators_of_functions
from distconv.rules.registrations import by_torch, registrations
from distconv.rules.schemas import is_tensor, is_view, operator
from distconv.rules.stock import answered, install_decompositions, leave, may_run_whole
from distconv.tensors import hooks
from distconv.tensors.arguments import each_of
from distconv.tensors.gathering.record import admit, in_model_call
from distconv.tensors.layouts import undoes_shard
from distconv.tensors.mesh import is_ours
from distconv.tensors.plain_tensors import entering, plain
from distconv.tensors.refusal import UnsupportedOperation, complete, operands_of
from distconv.tensors.replacements import once_in_process, replace, until_put_back, when_put_back
from distconv.tensors.user_lines import asked_for
from distconv.transfer import compilers

H = TypeVar("H", bound=Callable[..., Any])


def rule(*operators: str) -> Callable[[H], H]:
    """Decorates a handler that computes operators on DTensors of distconv's meshes; see CONTRIBUTING.md.

    Args:
        operators: their names, such as "aten::cumsum" or "mine::dilate"; with an overload, "aten::add.Tensor".

    Returns:
        A decorator of ``handler(func, *args, **kwargs)``. The handler is called below autograd, on every rank, with the
        operator and its arguments, and returns its result: DTensors, or whatever the operator gives.
    """

    def register(handler: H) -> H:
        def dispatch(cls: type, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
            kwargs = kwargs or {}
            mesh = _mesh(itertools.chain(args, kwargs.values()))
            if mesh is None or not is_ours(mesh):
                return by_torch(func, args, kwargs)
            if torch.is_inference_mode_enabled() and _views_normal(func, args):
                # As of a plain tensor, a view is no inference tensor.
                with torch.inference_mode(False), torch.no_grad():
                    return dispatch(cls, func, types, args, kwargs)
            try:
                args = entering(func, args, mesh)
                then = [check(func, args, kwargs) for check in hooks.before_operators]
                result = answered(handler, func, args, kwargs)
                for finish in then:
                    if finish is not None:
                        finish()
                return result
            except UnsupportedOperation as error:
                complete(error, func, operands_of((*args, *kwargs.values())), asked_for)
                raise

        for name in operators:
            registrations.add_rule(name, dispatch)
        return handler

    return register


def above_autograd(name: str) -> Callable[[H], H]:
    """Register ``function(*args)`` for an operator that torch takes apart before a DTensor is reached, or whose
    backward would know too little of the layouts of its tensors.

    The function runs where autograd does, for arguments among which is a DTensor of our meshes, and must be
    differentiable itself. Everything else does as before, and so does what the function returns NotImplemented for. In
    inference mode, where there is no autograd, it is the rule of the operator, unless that has one already.
    """

    def register(function: H) -> H:
        stock_operator = operator(name.removeprefix("aten::"))
        if name not in registrations:
            rule(name)(functools.partial(_function_or_parts, function))

        @functools.wraps(function)
        def kernel(as_before: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
            # Most calls are of plain tensors: the set of keys shows that at once.
            mesh = _our_mesh((*args, *kwargs.values())) if keyset.has(_SUBCLASS) else None
            if mesh is None:
                return as_before(keyset, *args, **kwargs)
            try:
                # Above autograd nobody else takes off a subclass, and what a function keeps it hands to the backward.
                given = entering(stock_operator, args, mesh)
                for check in hooks.before_operators:
                    check(stock_operator, given, kwargs)
                found = function(*given, **{name: _plain(value) for name, value in kwargs.items()})
                return as_before(keyset, *args, **kwargs) if found is NotImplemented else found
            except Exception as error:
                if isinstance(error, UnsupportedOperation):
                    if may_run_whole(error):
                        return as_before(keyset, *args, **kwargs)
                    complete(error, stock_operator, operands_of((*args, *kwargs.values())), asked_for)
                if not hooks.failed_operators:
                    raise
                return hooks.failed_operators[-1](stock_operator, args, kwargs, error)

        registrations.add_kernel(name, kernel)
        return function

    return register


def _function_or_parts(function: Callable[..., Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return _taken_apart(func, *args, **kwargs) if result is NotImplemented else result


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, Tensor) else value


_SUBCLASS = torch._C.DispatchKey.Python
"""Among the keys of a call where a tensor is of a subclass, or a mode of torch's is on."""


methods: dict[str, Callable[..., Any]] = {}
"""The methods of DTensor that have a handler, and what is put in the place of each."""


def method(name: str) -> Callable[[H], H]:
    """Register ``handler(stock_method, x, *args)`` for a method of DTensor, called for tensors on our meshes."""

    def register(handler: H) -> H:
        stock_method = getattr(DTensor, name)

        @functools.wraps(stock_method)
        def chosen(self: DTensor, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(self.device_mesh):
                return stock_method(self, *args, **kwargs)
            try:
                return handler(stock_method, self, *args, **kwargs)
            except UnsupportedOperation as error:
                complete(error, f"DTensor.{name}", operands_of((self, *args, *kwargs.values())), asked_for)
                raise

        methods[name] = chosen
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
            if name.startswith("aten::") and not name.endswith("out") and name not in registrations
        )
    )(_taken_apart)
    importlib.import_module(f"{package}.fallback").register()


def _taken_apart(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of the operators that it decomposes into, each by its own rule."""
    return func.decompose(*args, **kwargs)


def _our_mesh(values: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of the first DTensor on one of our meshes among some values, or in lists of them."""
    return next((x.device_mesh for x in each_of(DTensor, values) if is_ours(x.device_mesh)), None)


def _mesh(values: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of the first DTensor, found in lists too; a program may use others than ours for itself."""
    return next((x.device_mesh for x in each_of(DTensor, values)), None)


def unruled(wanted: Callable[[Any], bool]) -> list[str]:
    """torch's operators without a rule whose schema is wanted."""
    return [name for name, schema in schemas_without_rule() if wanted(schema)]


def schemas_without_rule() -> list[tuple[str, Any]]:
    """torch's operators without a rule, and the schema of each."""
    known = set(torch._C._dispatch_get_all_op_names()) - registrations.names
    schemas = (
        (f"{s.name}.{s.overload_name}" if s.overload_name else s.name, s) for s in torch._C._jit_get_all_schemas()
    )
    return [(name, schema) for name, schema in schemas if name.startswith("aten::") and name in known]


def _views_normal(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator makes a view of a DTensor that is no inference tensor."""
    return is_view(func) and isinstance(args[0], DTensor) and not args[0].is_inference()


@once_in_process
def watch_plain_tensors() -> None:
    """Look at every operator that may be given a plain tensor beside a DTensor, whether it has a rule or not.

    Ours and a program's own DTensors treat the plain one differently (see `distconv.tensors.plain_tensors`).
    """
    left_alone = {handled._schema.name for handled in DTensor._op_dispatcher._custom_op_handlers}

    def takes_several(schema: Any) -> bool:
        tensors = sum(is_tensor(argument.type) for argument in schema.arguments)
        return tensors > 1 and schema.name not in left_alone and not any(a.is_out for a in schema.arguments)

    rule(*unruled(takes_several))(leave)


def install_guard() -> None:
    """Make every silent gather of a shard on one of our meshes an ``UnsupportedOperation``, before it communicates, or
    count it outside every model's call."""
    dispatcher = DTensor._op_dispatcher
    redistribute = dispatcher.redistribute_local_args

    def guarded(op_info: Any, suggested: Any, *rest: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(suggested.args_schema)
        for before, after in zip(op_info.flat_args_schema, leaves, strict=False):
            if not (isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec) and is_ours(before.mesh)):
                continue
            # A replicated tensor becomes a partial sum without communication, so that sums can be added late.
            pairs = zip(before.placements, after.placements, strict=True)
            target = [b if b.is_replicate() and a.is_partial("sum") else a for b, a in pairs]
            if undoes_shard(before.mesh, before.placements, target):
                # Changes of a gathered view would not reach its tensor, as in `distconv.rules.whole.copies` does.
                if not in_model_call() and not is_view(suggested.op):
                    itemsize = before.tensor_meta.dtype.itemsize if before.tensor_meta is not None else 1
                    admit(suggested.op, math.prod(before.shape) * itemsize, before.mesh)
                    continue
                error = UnsupportedOperation(
                    f"{suggested.op}: no rule runs it on a tensor {tuple(before.shape)} laid out as"
                    f" {before.placements}; DTensor would gather it to {after.placements}."
                    f" Use distconv.gather first where that is meant"
                )
                specs = (each for each in op_info.flat_args_schema if isinstance(each, DTensorSpec))
                operands = [(tuple(each.shape), each.placements, each.mesh) for each in specs]
                raise complete(error, suggested.op, operands, asked_for)
        redistribute(op_info, suggested, *rest)

    replace(dispatcher, "redistribute_local_args", guarded)


@until_put_back
def install_rules() -> None:
    """Makes torch run operators on distconv's meshes by their rules, and refuse what has none; once in a process."""
    discover()
    registrations.put_in_place()
    when_put_back(registrations.take_back)
    for name, chosen in methods.items():
        replace(DTensor, name, chosen)
    install_guard()
    install_decompositions()
    compilers.watch_compilers()
    refuse_operators_of_functions()
    refuse_nested_tensors()
