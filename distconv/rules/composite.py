"""Operators made of others: autograd takes them apart before they reach a DTensor; in inference mode this does."""

from __future__ import annotations

from typing import Any

import torch

from distconv.rules import registered, rule


def _taken_apart(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operators that it is made of give, each by its own rule."""
    return func.decompose(*args, **kwargs)


rule(
    *(
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if name.startswith("aten::") and not name.endswith("out") and name not in registered
    )
)(_taken_apart)
