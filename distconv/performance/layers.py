"""The layers of a model as a graph, found by one call on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

INPUT = "(input)"


class NoGraph(ValueError):
    """A model whose layers cannot be listed: one line."""


@dataclass
class Layer:
    """A module with the norms and activations after it, or a join of several tensors: partitioned in one way."""

    name: str  # The name of the first module; for a join, such as a residual sum, the outer module's, with a number.
    modules: list[str]  # The names of all its modules in the order of their calls; of a join, those that follow it.
    around: str  # For a join, the name of the module in whose code it is; "" is the model itself.
    input: tuple[int, ...]  # The shape of its input.
    output: tuple[int, ...]  # The shape of its output.
    inputs: int = 1  # How many tensors join; 1 where there is no join.

    @property
    def is_join(self) -> bool:
        return self.inputs > 1


@dataclass
class LayerGraph:
    """The layers of a model by name, in the order of their calls, and what goes from one to another.

    Attributes:
        layers: by name.
        edges: (from, to): the shape of what goes from a layer to another one.
        first: the layers that read the model's input.
        last: the layer that gives its output.
        inputs: the shapes of the whole inputs, in their order.
        input: of those with the most dims the largest, which partitions are to divide.
    """

    layers: dict[str, Layer]
    edges: dict[tuple[str, str], tuple[int, ...]]
    first: list[str]
    last: str
    inputs: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    @property
    def input(self) -> tuple[int, ...]:
        return max(self.inputs, key=lambda shape: (len(shape), math.prod(shape)))


@dataclass
class _Tracing:
    layers: dict[str, Layer] = field(default_factory=dict)
    edges: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    maker_of: dict[int, str] = field(default_factory=dict)
    of_module: dict[str, str] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    inside: int = 0

    def source(self, tensor: Tensor) -> str | None:
        return self.maker_of.get(id(tensor))

    def give(self, values: Any, name: str) -> None:
        for tensor in _tensors(values):
            self.maker_of[id(tensor)] = name
            self.kept.append(tensor)  # as long as it lives no other tensor has its id

    def connect(self, tensors: Sequence[Tensor], name: str) -> None:
        for tensor in tensors:
            source = self.source(tensor)
            if source not in (None, name):
                self.edges[source or "", name] = tuple(tensor.shape)


def trace(model: nn.Module, *shapes: Sequence[int]) -> LayerGraph:
    """The layers of a model that is on the meta device.

    ``shapes``: of its whole inputs, (N, C, spatial...).

    Raises:
        NoGraph: one line, for a model that does not run without data, and for one without layers.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes]
    tracing = _Tracing()
    tracing.give(inputs, INPUT)
    try:
        with torch.no_grad(), _hooked(model, tracing), _Combinations(tracing):
            y = model(*inputs)
    except NoGraph:
        raise
    except Exception as error:  # a model's own code may fail in any way where it has shapes and no numbers
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoGraph(f"{type(model).__name__} does not run on {_words(shapes)} without data: {reason}") from None
    outputs = [name for tensor in _tensors(y) if (name := tracing.source(tensor)) not in (None, INPUT)]
    if not outputs:
        raise NoGraph(f"{type(model).__name__}: no layer gives its output; accepted: a model made of torch.nn modules")
    first = [b for a, b in tracing.edges if a == INPUT]
    edges = {pair: what for pair, what in tracing.edges.items() if pair[0] != INPUT}
    return LayerGraph(tracing.layers, edges, first, outputs[0] or "", tuple(map(tuple, shapes)), dtype)


def _words(shapes: Sequence[Sequence[int]]) -> str:
    given = " and ".join(str(tuple(shape)) for shape in shapes)
    return f"an input {given}" if len(shapes) == 1 else f"inputs {given}"


def equal_in(model: nn.Module, layer: Layer) -> str:
    """A text that is the same for layers that cost the same."""
    parts = [str(model.get_submodule(name)) for name in layer.modules]
    return f"{parts} {layer.input} {layer.output} {layer.inputs}"


def _follows(module: nn.Module, before: Tensor, after: Any) -> bool:
    """Whether it is a norm, an activation or the like, whose best layout is that of what it reads."""
    wide = any(parameter.dim() > 1 for parameter in module.parameters())
    return not wide and isinstance(after, Tensor) and after.shape == before.shape


@contextmanager
def _hooked(model: nn.Module, tracing: _Tracing) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None or module._parameters:

            def enter(module: nn.Module, args: Any) -> None:
                tracing.inside += 1

            def leave(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                tracing.inside -= 1
                if not tracing.inside:
                    _called(tracing, name, module, [*_tensors((args, kwargs))], result)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        else:

            def begin(module: nn.Module, args: Any, name: str = name) -> None:
                tracing.around.append(name)

            def end(module: nn.Module, args: Any, result: Any) -> None:
                tracing.around.pop()

            handles.append(module.register_forward_pre_hook(begin))
            handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called(tracing: _Tracing, name: str, module: nn.Module, inputs: list[Tensor], result: Any) -> None:
    if not inputs or not _tensors(result):
        return
    if len(inputs) > 1:
        raise NoGraph(f"layer {name} ({type(module).__name__}) takes {len(inputs)} tensors; accepted: layers of one")
    x, source = inputs[0], tracing.source(inputs[0])
    before = tracing.layers.get(source or "")
    if name in tracing.of_module:  # called again: its layout is that of the first call
        owner = tracing.of_module[name]
        tracing.connect(inputs, owner)
    elif before is not None and _follows(module, x, result):
        before.modules.append(name)
        owner = before.name
    else:
        owner = name
        tracing.layers[name] = Layer(name, [name], "", tuple(x.shape), tuple(_tensors(result)[0].shape))
        tracing.connect(inputs, name)
    tracing.of_module[name] = owner
    tracing.give(result, owner)


class _Combinations(TorchFunctionMode):
    """Follows tensors through what a model computes between its layers."""

    def __init__(self, tracing: _Tracing) -> None:
        super().__init__()
        self.tracing = tracing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tracing = self.tracing
        if tracing.inside:
            return result
        inputs = _tensors((args, kwargs or {}))
        sources = list(dict.fromkeys(name for x in inputs if (name := tracing.source(x)) is not None))
        outputs = _tensors(result)
        if not outputs or not sources:
            return result
        if len(sources) == 1:
            tracing.give(result, sources[0])
            return result
        around = tracing.around[-1] if tracing.around else ""
        count = sum(1 for layer in tracing.layers.values() if layer.is_join and layer.around == around)
        name = f"{around or 'model'}#{count + 1}"
        largest = max(inputs, key=lambda x: math.prod(x.shape))
        tracing.layers[name] = Layer(
            name, [], around, tuple(largest.shape), tuple(outputs[0].shape), inputs=len(sources)
        )
        tracing.connect(inputs, name)
        tracing.give(result, name)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
