"""Plans how a network's convolutions would be computed within limits, from recorded times alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.networks.layers import LayerCall
from mucudnn.optimizer import Division, Sharing, share
from mucudnn.planning.on_record import Choices, RecordedTimes
from mucudnn.planning.plan import MARGIN
from mucudnn.reporting.record import Record
from mucudnn.reporting.tables import speed_up
from mucudnn.settings import Settings
from mucudnn.sizes import format_bytes


@dataclass(frozen=True)
class Row:
    """Kernels of one layer and direction that are computed the same way."""

    layer: LayerCall  # The layer; its count is that of all its kernels, whether computed the same way or not.
    count: int  # Kernels that are computed this way.
    choice: Division  # How.
    choices: Choices  # What there was to choose from.
    record: Record  # The same for tables.

    @property
    def direction(self) -> str:
        """The direction in words."""
        return self.record.direction.replace("_", " ")

    @property
    def fastest(self) -> Division:
        """The fastest division, with as much workspace as it needs."""
        return self.choices.desirable[-1]


@dataclass(frozen=True)
class NetworkPlan:
    """The plan of a network."""

    rows: Sequence[Row]  # In the order of the network's layers.
    missing: Sequence[LayerCall]  # The layers of which no times are on record.
    sharing: Sharing[Division] | None  # How the total was divided; `None` where one workspace is reused.
    limit: float  # Bytes that one convolution may use.
    total: float | None  # Bytes that all may use together; `None` where they reuse one workspace.

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
        return self._together([(row, row.choice.workspace) for row in self.rows])

    def sentences(self) -> list[str]:
        """The time that the plan gains, the workspace that it saves, and its limits."""
        if not self.rows:
            return []
        return [*self._gain(), *self._saved(), *self._limits()]

    def _gain(self) -> list[str]:
        kernels = sum(row.count for row in self.rows)
        text = (
            f"{kernels} kernels of one step: {_ms(self.seconds)} predicted, "
            f"{speed_up(self.stock_seconds, self.seconds)} the speed of torch's own kernels"
            f" ({_ms(self.stock_seconds)})."
        )
        if self.sharing is not None and self.sharing.gap > 0:
            text += f" No sharing of this total is faster by more than {self.sharing.gap:.2%}."
        return [text]

    def _saved(self) -> list[str]:
        used = f"Workspace: {format_bytes(self.workspace)} "
        used += "at most, reused by all." if self.total is None else f"in all, of {format_bytes(self.total)}."
        divided = [row for row in self.rows if row.record.is_divided]
        matched = [(row, size) for row in divided if (size := _undivided_bytes(row)) is not None]
        if matched:
            used += (
                f" As fast undivided, {len(matched)} divided ones would need "
                f"{format_bytes(self._together([(row, size) for row, size in matched]))} instead of "
                f"{format_bytes(self._together([(row, row.choice.workspace) for row, _ in matched]))}."
            )
        if len(matched) < len(divided):
            used += f" {len(divided) - len(matched)} are faster divided than any undivided algorithm on record."
        return [used]

    def _together(self, sizes: Sequence[tuple[Row, int]]) -> int:
        if self.total is None:
            return max((size for _, size in sizes), default=0)
        return sum(row.count * size for row, size in sizes)

    def _limits(self) -> list[str]:
        sentences = []
        best = sum(row.count * row.fastest.seconds for row in self.rows)
        if best < self.seconds * (1 - 1e-9):
            helped = max(self.rows, key=lambda row: row.count * (row.choice.seconds - row.fastest.seconds))
            gain = helped.count * (helped.choice.seconds - helped.fastest.seconds)
            sentences.append(
                f"The {'limit' if self.total is None else 'total'} costs {speed_up(self.seconds, best)}: without it "
                f"{_ms(best)}. Most would be gained in {helped.layer.name}, {helped.direction}: "
                f"{_ms(gain)} with {format_bytes(helped.fastest.workspace)} instead of "
                f"{format_bytes(helped.choice.workspace)}{' each' if helped.count > 1 else ''}."
            )
        else:
            sentences.append("More workspace would not make it faster: every kernel has its best division on record.")
        idle = [row for row in self.rows if len(row.choices.desirable) == 1]
        if idle:
            part = sum(row.count * row.choice.seconds for row in idle) / self.seconds
            sentences.append(
                f"{part:.0%} of the time is in {sum(row.count for row in idle)} kernels where nothing on record beats "
                "torch's own."
            )
        return sentences


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
    )


def _undivided_bytes(row: Row) -> int | None:
    """Workspace of the lightest undivided algorithm on record that is about as fast as the row's division."""
    fast = [c.workspace for c in row.choices.undivided if c.seconds <= row.choice.seconds * (1 + MARGIN)]
    return min(fast, default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
