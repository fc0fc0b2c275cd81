"""Operators of the script, outside every model's call: what a rule refuses on shards runs on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distconv.tensors import hooks
from distconv.tensors.gathering.calls import in_model_call
from distconv.tensors.refusal import UnsupportedOperation


def may_run_whole(error: UnsupportedOperation) -> bool:
    """Whether a refused operator is to run on whole tensors instead."""
    return error.whole_helps and not in_model_call()


def answered(handler: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a rule, else of the operator on whole tensors. UnsupportedOperation if neither may run."""
    try:
        return handler(func, *args, **kwargs)
    except UnsupportedOperation as error:
        if not may_run_whole(error):
            raise
        return hooks.whole_operators[0](func, args, kwargs, error)
