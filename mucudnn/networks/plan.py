"""Plans how a network's convolutions would be computed within limits, from recorded times alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.networks.layers import LayerCall
from mucudnn.optimizer import Division, Sharing, share
from mucudnn.planning.on_record import Choices, RecordedTimes
from mucudnn.reporting.record import Record
from mucudnn.reporting.tables import speed_up, summary
from mucudnn.settings import Settings
from mucudnn.sizes import format_bytes


@dataclass(frozen=True)
class Row:
    """Kernels of one layer and direction that are computed the same way.

    Attributes:
        layer: the layer; its count is that of all its kernels, whether computed the same way or not.
        count: kernels that are computed this way.
        choice: how.
        choices: what there was to choose from.
        record: the same for tables.
    """

    layer: LayerCall
    count: int
    choice: Division
    choices: Choices
    record: Record

    @property
    def fastest(self) -> Division:
        """The fastest division, with as much workspace as it needs."""
        return self.choices.desirable[-1]


@dataclass(frozen=True)
class NetworkPlan:
    """The plan of a network.

    Attributes:
        rows: in the order of the network's layers.
        missing: the layers of which no times are on record.
        sharing: how the total was divided; `None` where one workspace is reused.
        limit: bytes that one convolution may use.
        total: bytes that all may use together; `None` where they reuse one workspace.
    """

    rows: Sequence[Row]
    missing: Sequence[LayerCall]
    sharing: Sharing[Division] | None
    limit: float
    total: float | None

    @property
    def seconds(self) -> float:
        """Seconds of all kernels of one training step."""
        return sum(row.count * row.choice.seconds for row in self.rows)

    @property
    def stock_seconds(self) -> float:
        """Seconds of the same convolutions by torch's own kernels."""
        return sum(row.count * row.record.stock_seconds for row in self.rows)

    @property
    def workspace(self) -> int:
        """Bytes that must be there: the largest where they are reused, the sum where each kernel has its own."""
        if self.total is None:
            return max((row.choice.workspace for row in self.rows), default=0)
        return sum(row.count * row.choice.workspace for row in self.rows)

    def sentences(self) -> list[str]:
        """The time that the plan gains, its workspace, and what the limit costs."""
        if not self.rows:
            return []
        found = [summary([row.record for row in self.rows], [row.count for row in self.rows])]
        used = f"Workspace: {format_bytes(self.workspace)} "
        found.append(used + ("at most, reused by all." if self.total is None else f"of {format_bytes(self.total)}."))
        if self.sharing is not None and self.sharing.gap > 0:
            found.append(f"No sharing of this total is faster by more than {self.sharing.gap:.2%}.")
        best = sum(row.count * row.fastest.seconds for row in self.rows)
        if best < self.seconds * (1 - 1e-9):
            helped = max(self.rows, key=lambda row: row.count * (row.choice.seconds - row.fastest.seconds))
            name = f"{helped.layer.name}, {helped.record.direction.replace('_', ' ')}"
            found.append(
                f"Without the {'limit' if self.total is None else 'total'} it would be {speed_up(self.seconds, best)} "
                f"as fast; most would be gained in {name}, with {format_bytes(helped.fastest.workspace)}."
            )
        return found


def plan(layers: Sequence[LayerCall], known: RecordedTimes, settings: Settings) -> NetworkPlan:
    """The fastest plan of a network within the settings' limit and total.

    Args:
        layers: of which those that are not known are left out.
        known: times of one environment.
    """
    missing = [layer for layer in layers if not known.knows(layer.problem)]
    timed = [layer for layer in layers if known.knows(layer.problem)]
    found = [known.choices(layer.problem, settings.policy) for layer in timed]
    within = [[c for c in choices.desirable if c.workspace <= settings.workspace_limit] for choices in found]
    total, sharing = settings.total_workspace_size, None
    if total is None:
        chosen = [[choices[-1]] * layer.count for layer, choices in zip(timed, within, strict=True)]
    else:
        sharing = share([c for layer, c in zip(timed, within, strict=True) for _ in range(layer.count)], total)
        left = iter(sharing.divisions)
        chosen = [[next(left) for _ in range(layer.count)] for layer in timed]
    rows = []
    for layer, choices, kernels in zip(timed, found, chosen, strict=True):
        for choice in dict.fromkeys(kernels):
            limit = settings.workspace_limit if total is None else choice.workspace
            record = _record(layer, choice, choices, limit)
            rows.append(Row(layer, kernels.count(choice), choice, choices, record))
    return NetworkPlan(rows, missing, sharing, settings.workspace_limit, total)


def _record(layer: LayerCall, choice: Division, choices: Choices, limit: float) -> Record:
    used = {option.algorithm for option in choice.options} - {option.algorithm for option in choices.stock.options}
    undivided = [other.seconds for other in choices.undivided if other.workspace <= limit]
    if len(choice.options) == 1:
        undivided.append(choice.seconds)
    return Record(
        problem=layer.problem,
        direction=str(layer.problem.direction),
        limit=limit,
        parts=tuple((option.extent, option.algorithm) for option in choice.options),
        seconds=choice.seconds,
        undivided_seconds=min(undivided),
        stock_seconds=choices.stock.seconds,
        workspace=choice.workspace,
        dim=choice.dim,
        whole_workspace=max((each.workspace for each in choices.undivided if each.algorithm in used), default=0),
    )
