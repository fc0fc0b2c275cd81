"""The name of one algorithm of cuDNN's graph API: an engine and the values of its knobs."""

from __future__ import annotations

from typing import NamedTuple, Self


class Configuration(NamedTuple):
    """An engine with choices of its knobs, as (type, value); those that are not listed have their defaults."""

    engine: int
    knobs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """As cuDNN's own tools spell it: "eng17_k2=3_k13=0"."""
        return "_".join((f"eng{self.engine}", *(f"k{kind}={value}" for kind, value in self.knobs)))

    @classmethod
    def parsed(cls, text: str) -> Self:
        engine, *knobs = text.removeprefix("eng").split("_k")
        pairs = (knob.split("=") for knob in knobs)
        return cls(int(engine), tuple((int(kind), int(value)) for kind, value in pairs))
