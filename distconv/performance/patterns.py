"""A strategy of few patterns for partitions that were chosen layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from distconv.partition import Partition
from distconv.performance.layers import LayerGraph


def patterns(model: nn.Module, graph: LayerGraph, layers: Mapping[str, Partition]) -> dict[str, str]:
    """A strategy that gives every layer its partition, in as few patterns as its modules' names allow."""
    of_module = {module: layers[name] for name, layer in graph.layers.items() for module in layer.modules}
    meetings: dict[str, Partition] = {}
    for name, layer in graph.layers.items():
        if layer.is_meeting:
            meetings.setdefault(layer.around, layers[name])
    outer = layers[
        graph.first[0] if math.prod(graph.input) >= math.prod(graph.layers[graph.last].output) else graph.last
    ]
    found: dict[str, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        within = {
            partition
            for inner, _ in module.named_modules(prefix=name)
            for partition in (of_module.get(inner), meetings.get(inner))
            if partition is not None
        }
        if len(within) == 1 and name:
            found[name] = str(next(iter(within)))
            return
        for child, inner in module.named_children():
            visit(f"{name}.{child}" if name else child, inner)
        if name and name in meetings:
            found[name] = str(meetings[name])

    visit("", model)
    found = {pattern: text for pattern, text in found.items() if text != str(outer)} if _is_flat(found) else found
    return {**found, "*": str(outer)}


def _is_flat(found: Mapping[str, str]) -> bool:
    """Whether no pattern lies within another one, so that any may be left to ``*``."""
    return not any(a != b and a.startswith(f"{b}.") for a in found for b in found)
