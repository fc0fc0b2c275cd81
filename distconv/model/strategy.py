"""Strategy: the partition of each layer, given by patterns of layer names, in a program or in a file.

{"layer3.*": "channel=4", "*": "sample=4"}          the first pattern that matches a layer's name decides
{"layer3.*": "channel=4,algorithm=y", ...}           how channels are split there (distconv.settings.channels)

[layers]                                             the same as a file, strategy.toml
"layer3.*" = "channel=4"
"*" = "sample=4"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from distconv.settings.channels import check_algorithm
from distconv.settings.partition import Partition, shards_channels

if TYPE_CHECKING:
    from torch import nn

ALGORITHM = "algorithm"  # The word before a channel algorithm, after the axes of a partition.


@dataclass(frozen=True)
class Strategy:
    """Patterns, as of the shell (``*``, ``?``, ``[...]``), and the partition of the layers that each is the first to
    match, by their own name or that of a layer around them. A layer that none matches runs under the model's partition.
    """

    layers: tuple[tuple[str, Partition, str | None], ...]
    """(pattern, partition, channel algorithm), in order; layers without an algorithm take the mesh's."""

    @classmethod
    def parse(cls, layers: Mapping[str, str], ranks: int | None = None, where: str = "strategy") -> Strategy:
        """From {pattern: partition}. ValueError, one line, for a partition that cannot be read or has not ``ranks``
        ranks (those of the first, where None), and for a pattern behind one that matches everything."""
        found: list[tuple[str, Partition, str | None]] = []
        for pattern, text in layers.items():
            if not isinstance(pattern, str) or not pattern or not isinstance(text, str):
                raise ValueError(f"{where}: {pattern!r}: {text!r}; accepted: a pattern of layer names and a partition")
            if any(earlier == "*" for earlier, *_ in found):
                raise ValueError(f"{where}: {pattern!r} comes after '*', which matches every layer; put '*' last")
            try:
                partition, algorithm = parse_layer(text)
            except ValueError as error:
                raise ValueError(f"{where}: {pattern!r}: {error}") from None
            ranks = ranks or partition.ranks
            if partition.ranks != ranks:
                raise ValueError(f"{where}: {pattern!r}: {text!r} is for {partition.ranks} ranks; accepted: {ranks}")
            found.append((pattern, partition, algorithm))
        return cls(tuple(found))

    @property
    def is_one_partition(self) -> bool:
        """Whether it says no more than the partition of all layers."""
        return [(pattern, algorithm) for pattern, _, algorithm in self.layers] == [("*", None)]

    @property
    def outer(self) -> Partition | None:
        """The partition of the pattern ``*``; None without one."""
        return next((partition for pattern, partition, _ in self.layers if pattern == "*"), None)

    def algorithm(self, pattern: str) -> str | None:
        """The channel algorithm that a pattern names; None where it names none."""
        return next(algorithm for own, _, algorithm in self.layers if own == pattern)

    def partition(self, name: str) -> tuple[str, Partition] | None:
        """The pattern that decides on a layer, and its partition."""
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        matching = ((p, found) for p, found, _ in self.layers if any(fnmatchcase(one, p) for one in around))
        return next(matching, None)

    def assign(self, model: nn.Module) -> dict[nn.Module, tuple[str, Partition]]:
        """{module: the pattern that decides on it, and its partition}; modules that none matches are left out.

        The model itself goes by the name ``""``, which ``*`` matches.
        """
        chosen = ((module, self.partition(name)) for name, module in model.named_modules())
        return {module: choice for module, choice in chosen if choice is not None}

    def check(self, used: set[str], models: Sequence[nn.Module]) -> None:
        """ValueError, one line, for a pattern that is not among those used: it decides on no layer of the models."""
        for pattern, *_ in self.layers:
            if pattern not in used and pattern != "*":
                names = ", ".join(name for model in models for name, _ in model.named_children())
                what = " and ".join(dict.fromkeys(type(model).__name__ for model in models)) or "any model"
                raise ValueError(f"strategy: pattern {pattern!r} decides on no layer of {what}; its layers: {names}")


def parse_layer(text: str) -> tuple[Partition, str | None]:
    """A partition and, where the text has ``algorithm=x``, a channel algorithm. ValueError, one line, for others."""
    items = [item.strip() for item in text.split(",")]
    named = [item for item in items if item.partition("=")[0].strip() == ALGORITHM]
    partition = Partition.parse(",".join(item for item in items if item not in named))
    if not named:
        return partition, None
    if len(named) > 1 or not any(map(shards_channels, partition.names)):
        raise ValueError(f"{text!r}: accepted: one {ALGORITHM}=, behind a partition with the axis channel")
    return partition, check_algorithm(named[0].partition("=")[2].strip(), partition)


def layer_text(partition: Partition, algorithm: str | None = None) -> str:
    """The inverse of `parse_layer`."""
    return str(partition) if algorithm is None else f"{partition},{ALGORITHM}={algorithm}"


def as_toml(strategy: Mapping[str, str]) -> str:
    """The text of a file of {pattern: partition}, as :func:`read_strategy` takes it."""
    lines = [f"{json.dumps(pattern)} = {json.dumps(partition)}" for pattern, partition in strategy.items()]
    return "\n".join(["[layers]", *lines, ""])


def read_strategy(path: str | Path, ranks: int | None = None) -> Strategy:
    """The strategy of a TOML file with one table, ``[layers]``.

    ValueError, one line, for a file that is not that, and as :meth:`Strategy.parse` raises it.
    """
    where = f"strategy {str(path)!r}"
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {error}") from None
    layers = content.get("layers")
    if set(content) != {"layers"} or not isinstance(layers, dict) or not layers:
        raise ValueError(f'{where}: accepted: one table [layers] of "pattern" = "axis=ranks,..."')
    return Strategy.parse(layers, ranks, where)
