"""Reduces a choice for every layer to a strategy of few patterns."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from distconv.performance.layers import LayerGraph


def patterns(model: nn.Module, graph: LayerGraph, layers: Mapping[str, str]) -> dict[str, str]:
    """A strategy that gives every layer its partition, in as few patterns as its modules' names allow.

    ``layers``: {layer: its partition, perhaps with a channel algorithm, as a strategy says it}.
    """
    of_module = {module: layers[name] for name, layer in graph.layers.items() for module in layer.modules}
    joins: dict[str, str] = {}
    for name, layer in graph.layers.items():
        if layer.is_join:
            joins.setdefault(layer.around, layers[name])
    outer = layers[
        graph.first[0] if math.prod(graph.input) >= math.prod(graph.layers[graph.last].output) else graph.last
    ]
    found: dict[str, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        within = {
            text
            for inner, _ in module.named_modules(prefix=name)
            for text in (of_module.get(inner), joins.get(inner))
            if text is not None
        }
        if len(within) == 1 and name:
            found[name] = next(iter(within))
            return
        for child, inner in module.named_children():
            visit(f"{name}.{child}" if name else child, inner)
        if name and name in joins:
            found[name] = joins[name]

    visit("", model)
    found = {pattern: text for pattern, text in found.items() if text != outer} if _is_flat(found) else found
    return {**found, "*": outer}


def _is_flat(found: Mapping[str, str]) -> bool:
    """Whether no pattern is part of another one, so that any may be left to ``*``."""
    return not any(a != b and a.startswith(f"{b}.") for a in found for b in found)
