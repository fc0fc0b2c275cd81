"""The findings of a check: refusals, the traffic of each layer, and memory; and their tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def parts(findings: Findings, most: int | None) -> list[RenderableType]:
    """The printed parts: the layers that send most (all if ``most`` is None), the refusals, and a summary."""
    from rich.markup import escape

    shown: list[RenderableType] = []
    layers = sorted(findings.layers, key=lambda layer: -(layer.forward + layer.backward))
    if layers:
        shown.append(_layers(layers, most))
    if findings.refusals:
        shown.append(_refusals(findings))
    return [*shown, escape(findings_summary(findings))]


def findings_summary(findings: Findings) -> str:
    """The findings in a few sentences."""
    sent = sum(layer.forward + layer.backward for layer in findings.layers)
    sentences = [f"{findings.partition}, {findings.ranks} ranks: a rank sends {format_bytes(sent)} in this step."]
    peak = f"Its tensors take at most {format_bytes(findings.peak)}"
    if findings.peak_alone:
        share = findings.peak / findings.peak_alone
        peak += f", {share:.2f} of the {format_bytes(findings.peak_alone)} of one process"
    sentences.append(f"{peak}.")
    refused = sum(refusal.kind == "refused" for refusal in findings.refusals)
    failed = len(findings.refusals) - refused
    if findings.accepted:
        sentences.append("Every operator runs.")
    if refused:
        sentences.append(
            f"{refused} calls of operators are refused." if refused > 1 else "One call of an operator is refused."
        )
    if failed:
        sentences.append(f"{failed} fail, which is a fault of distconv.")
    if any(refusal.message in findings.ended for refusal in findings.refusals):
        sentences.append("Without the result of the last one the rest of the step cannot be followed.")
    elif findings.ended:
        sentences.append(f"The step ended early: {findings.ended}")
    return " ".join(sentences)


def _layers(layers: list[LayerTraffic], most: int | None) -> Table:
    from rich.table import Table

    rest = layers[most:] if most is not None else []
    table = Table(title="What a rank sends")
    table.add_column("layer", overflow="fold")
    table.add_column("kind")
    table.add_column("forward", justify="right")
    table.add_column("backward", justify="right")
    for layer in layers[:most]:
        table.add_row(layer.name, layer.kind, format_bytes(layer.forward), format_bytes(layer.backward))
    if rest:
        forward, backward = sum(layer.forward for layer in rest), sum(layer.backward for layer in rest)
        table.add_row(f"{len(rest)} other layers", "", format_bytes(forward), format_bytes(backward))
    return table


def _refusals(findings: Findings) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="What does not run", show_lines=True)
    for name in ("", "layer", "pass"):
        table.add_column(name)
    table.add_column("why", overflow="fold")
    for refusal in findings.refusals:
        table.add_row(
            refusal.kind, refusal.layer, "backward" if refusal.backward else "forward", escape(refusal.message)
        )
    return table


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
