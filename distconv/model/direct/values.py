"""The methods through which an activation's values leave torch; its DTensor answers them."""

from __future__ import annotations

from typing import Any

from distconv.model.direct.activation import Activation
from distconv.rules.registry import methods


def _delegate(name: str) -> None:
    def of_dtensor(x: Activation, *args: Any, **kwargs: Any) -> Any:
        return getattr(x.as_dtensor(), name)(*args, **kwargs)

    setattr(Activation, name, of_dtensor)


for _name in methods:
    _delegate(_name)

# Libraries, such as opt_einsum, choose how to compute by the first name of the module that a tensor's class is from.
Activation.__module__ = "torch.distributed.tensor"
