"""The check behind a model's call: its parameters are still the ones that its layers have computed with.

`distconv.model.direct.parameters` sees whatever changes a parameter by torch's functions. What it cannot see, such as a
parameter put straight into a module's dict of parameters, would leave gradients that are not summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.model.parameters import current
from distconv.model.uses import Uses
from distconv.settings import value
from distconv.tensors.mesh import is_the_programs
from distconv.tensors.refusal import UnsupportedOperation


def check_parameters(modules: Iterable[nn.Module], uses: Uses) -> None:
    """Compares the parameters of a model with those that were used in its call, by identity and by memory.

    Which differ follows from what the program has done, so all ranks raise the same error. Nothing is sent.

    Args:
        modules: the model and all modules in it.
        uses: of the call that has ended.

    Raises:
        UnsupportedOperation: names the parameter, and says what is accepted.
    """
    if value("check") == "off":
        return
    with torch._C.DisableTorchFunctionSubclass():
        for module in modules:
            for name, own in module._parameters.items():
                if own is None or is_the_programs(own):
                    continue
                parameter = current(own)
                roots = uses.roots(parameter)
                if roots is None:
                    how = "was put into the module's dict while the model ran"
                elif any(_elsewhere(root, parameter) for root in roots):
                    how = "was given other memory while the model ran, by no function of torch"
                else:
                    continue
                raise UnsupportedOperation(
                    f"parameter {name!r} {tuple(parameter.shape)} of {type(module).__name__} {how}; accepted:"
                    f" module.{name} = ..., register_parameter, .data = ..., set_, and functions in place"
                )


def _elsewhere(root: Tensor, parameter: Tensor) -> bool:
    own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return root.data_ptr() != own.data_ptr() and root.shape == own.shape
