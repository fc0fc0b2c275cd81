"""torch's own samples of its operators and modules, and which of their tensors are sharded.

They are what PyTorch tests itself with: `op_db` (OpInfo) and `module_db`, in float64. Of every operator at most some
samples are taken, evenly out of all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves

MOST_GENERATED = 400
"""Samples of one operator that are generated at most; a few operators have thousands."""

PARAMETERS: dict[str, tuple[int, ...]] = {
    **{f"nn.functional.conv{d}d": (0, 1) for d in (1, 2, 3)},
    **{f"nn.functional.conv_transpose{d}d": (0, 1) for d in (1, 2, 3)},
    **dict.fromkeys(("nn.functional.linear", "nn.functional.prelu"), (0, 1)),
    **dict.fromkeys(("nn.functional.bilinear",), (1, 2)),
}
"""The arguments after the input that are parameters of a layer: they stay plain whatever their dims."""


@dataclass(frozen=True)
class Sample:
    """One call: ``function(input, *args, **kwargs)``; ``process`` makes of its results what is differentiated."""

    function: Callable[..., Any]
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    parameters: tuple[int, ...]
    in_place: bool = False

    def dims(self) -> int:
        """Of the input: of its largest tensor, where it is a list."""
        return max((t.dim() for t in tree_leaves(self.input) if isinstance(t, Tensor)), default=0)

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Its tensors, and whether each is a layer's parameter."""
        yield from ((t, False) for t in tree_leaves((self.input, self.kwargs)) if isinstance(t, Tensor))
        for index, value in enumerate(self.args):
            yield from ((t, index in self.parameters) for t in tree_leaves(value) if isinstance(t, Tensor))


@dataclass(frozen=True)
class ModuleSample:
    """A module to be made by ``build`` and called with these arguments."""

    build: Callable[[], torch.nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """The tensors that it is called with; none of them is a parameter."""
        yield from ((t, False) for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor))


@dataclass(frozen=True)
class Operator:
    """One entry of torch's tables."""

    name: str
    info: Any

    def samples(self, most: int) -> list[Sample]:
        """Up to ``most`` samples of the function, and one of the variant in place where there is one."""
        _seed()
        listed = self.info.sample_inputs("cpu", torch.float64, requires_grad=False)
        chosen = evenly(list(itertools.islice(listed, MOST_GENERATED)), most)
        parameters = PARAMETERS.get(self.info.name, ())
        found = [
            Sample(self.info.op, s.input, tuple(s.args), s.kwargs, s.output_process_fn_grad, parameters) for s in chosen
        ]
        variant = self.info.inplace_variant
        if variant is not None and found:
            one = max(found, key=Sample.dims)
            found.append(Sample(variant, one.input, one.args, one.kwargs, one.process, parameters, in_place=True))
        return found


@dataclass(frozen=True)
class Module:
    """One entry of torch's table of modules."""

    info: Any

    @cached_property
    def name(self) -> str:
        return f"{self.info.name} (module)"

    def samples(self, most: int) -> list[ModuleSample]:
        """Up to ``most`` modules with inputs."""
        _seed()
        listed = self.info.module_inputs_func(
            self.info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
        return [self._sample(each) for each in evenly(list(itertools.islice(listed, MOST_GENERATED)), most)]

    def _sample(self, listed: Any) -> ModuleSample:
        made, call = listed.constructor_input, listed.forward_input

        def build() -> torch.nn.Module:
            torch.random.manual_seed(7)
            module = self.info.module_cls(*made.args, **made.kwargs).to(torch.float64)
            if isinstance(module, LazyModuleMixin):
                module(*call.args, **call.kwargs)  # makes its parameters, as torch asks before anything else is done
            return module

        return ModuleSample(build, tuple(call.args), call.kwargs)


def entries() -> list[Operator | Module]:
    """Everything that has samples in float64, operators first."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    operators = [Operator(info.formatted_name, info) for info in op_db if info.supports_dtype(torch.float64, "cpu")]
    return [*operators, *(Module(info) for info in module_db)]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """``most`` of the items, the first and the last among them, or all where there are no more."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(most - 1, 1))] for i in range(most)]


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
