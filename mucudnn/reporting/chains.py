"""Finds consecutive layers that are computed on copies in another memory format, and the copies that could be saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.reporting.record import Record
from mucudnn.sizes import format_bytes


@dataclass
class Chain:
    """Layers, each reading tensors of the shape that the one before it computes, all on copies in one format.

    Attributes:
        format: "channels_last" or "contiguous".
        layers: their forward passes, in the order of the records.
        copied: bytes that one call of each copied direction writes to copies.
    """

    format: str
    layers: list[ConvProblem]
    copied: int = 0

    @property
    def memory_format(self) -> str:
        """The format as `Module.to` names it."""
        if self.format == "contiguous":
            return "torch.contiguous_format"
        return "torch.channels_last" if self.layers[0].dims == 2 else "torch.channels_last_3d"


def chains(records: Iterable[Record]) -> list[Chain]:
    """The chains among convolutions, in the order of the records."""
    copied: dict[tuple[str, ConvProblem], int] = {}
    for record in records:
        for name in dict.fromkeys(algorithm.partition("@")[2] for _, algorithm in record.parts):
            if name in ("channels_last", "contiguous"):
                key = name, _layer(record.problem)
                copied[key] = copied.get(key, 0) + _copied(record, name)
    found: list[Chain] = []
    for (name, layer), size in copied.items():
        near = [chain for chain in found if chain.format == name and any(_are_next(layer, o) for o in chain.layers)]
        chain = Chain(name, [*(other for c in near for other in c.layers), layer], size + sum(c.copied for c in near))
        found = [*(one for one in found if one not in near), chain]
    return found


def hints(records: Sequence[Record]) -> list[str]:
    """How a program would have the layers of each chain in their format from the start; a sentence for each chain."""
    return [
        f"{_several(chain.layers)} would stay in {chain.format}: "
        f"model.to(memory_format={chain.memory_format}) saves {format_bytes(chain.copied)} of copies in one call of "
        "each."
        for chain in chains(records)
    ]


def _several(layers: Sequence[ConvProblem]) -> str:
    return f"1 layer ({layers[0]})" if len(layers) == 1 else f"{len(layers)} layers in a row ({layers[0]}, ...)"


def _layer(problem: ConvProblem) -> ConvProblem:
    """The layer's forward problem, which its three directions share."""
    return replace(problem, direction=Direction.FORWARD, formats=("contiguous",) * 3)


def _are_next(one: ConvProblem, other: ConvProblem) -> bool:
    """Whether one of two layers may read what the other computes."""
    return one.input_shape == other.output_shape or one.output_shape == other.input_shape


def _copied(record: Record, name: str) -> int:
    """Bytes of the copies of one call: of x and y by the samples that are computed so, and of the weight."""
    problem = record.problem
    samples = sum(extent for extent, algorithm in record.parts if algorithm.endswith(f"@{name}"))
    each = sum(math.prod(shape[1:]) for shape in (problem.x_shape, problem.y_shape))
    return problem.element_bytes * (samples * each + math.prod(problem.w_shape))
