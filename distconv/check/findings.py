"""The findings of a check: refusals, the traffic of each layer, and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """An operator that does not run: ``kind`` is "refused", or "fails" for an error from inside."""

    kind: str
    operator: str
    layer: str
    backward: bool
    message: str


@dataclass
class LayerTraffic:
    """Bytes that one module's own operators send on a rank, in forward and in backward."""

    name: str
    kind: str
    forward: int = 0
    backward: int = 0


@dataclass
class Findings:
    """The result of one step on rank 0. Bytes are those that it sends; peaks are bytes of tensors alive at once."""

    partition: str
    ranks: int
    refusals: list[Refusal] = field(default_factory=list)
    layers: list[LayerTraffic] = field(default_factory=list)
    peak: int = 0
    peak_alone: int | None = None
    ended: str = ""  # Why the step could not be followed to its end; empty where it was.

    @property
    def accepted(self) -> bool:
        """Whether every operator runs."""
        return not self.refusals and not self.ended

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {"accepted": self.accepted, **asdict(self)}
