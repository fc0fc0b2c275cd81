"""Tables of records, and of the times in a database, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mucudnn.convolution.problem import ConvProblem
from mucudnn.optimizer import Option
from mucudnn.reporting.record import Record, known
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table  # imported where a table is made: whoever prints none needs no rich


def table(records: Sequence[Record], names: Sequence[str] | None = None, wide: bool = False) -> Table:
    """A row per record, in the given order.

    Args:
        names: the first column, for instance the layers' names; left out if not given.
        wide: with the columns that are details: the speed-up over undivided algorithms, and what was tried.
    """
    limits = {record.limit for record in records}
    title = f"workspace limit {format_bytes(*limits)}" if len(limits) == 1 else None
    is_live = wide and any(record.trials for record in records)
    is_counted = any(record.stock_workspace is not None for record in records)
    name = iter(names or ())
    text: dict[str, Any] = {"overflow": "fold"}
    number: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns: list[tuple[bool, str, dict[str, Any], Callable[[Record], str]]] = [
        (names is not None, "layer", text, lambda _: next(name)),
        (True, "convolution", text | {"min_width": 8}, lambda record: str(record.problem)),
        (True, "direction", {}, lambda record: _spaced(record.direction)),
        (True, "division", text, _division),
        (True, "ms", number, lambda record: f"{record.seconds * 1e3:.3f}"),
        (wide, "over\nundivided", number, lambda record: speed_up(record.undivided_seconds, record.seconds)),
        (True, "over\nstock", number, lambda r: "-" if r.is_stock_assumed else speed_up(r.stock_seconds, r.seconds)),
        (True, "workspace", number, lambda record: format_bytes(record.workspace)),
        (title is None, "limit", number, lambda record: format_bytes(record.limit)),
        (is_counted, "stock's\nworkspace", number, _stock_workspace),
        (is_live, "tried", text, lambda r: ", ".join(f"{name} {n} time{'s' * (n > 1)}" for name, n in r.tries)),
        (is_live, "trials\nsaved ms", number, lambda record: f"{-record.cost * 1e3:+.1f}"),
    ]
    shown = _narrow_table(title)
    for is_shown, heading, style, _ in columns:
        if is_shown:
            shown.add_column(heading, **style)
    for record in records:
        shown.add_row(*(cell(record) for is_shown, _, _, cell in columns if is_shown))
    return shown


def summary(records: Sequence[Record], counts: Sequence[int] | None = None, called: int = 0) -> str:
    """The totals of the records: the time gained, the workspace saved, what limits both, and how to gain more.

    Args:
        counts: how often each is called; once if not given.
        called: number of convolutions that the program called, where that is known: not all of them are timed.
    """
    if not records and called:
        return (
            f"{called} convolution{'s' * (called > 1)} called, by shape and direction, each too seldom to be timed: "
            "torch's own kernels computed them."
        )
    if not records:
        return "No convolution was called."
    divided = sum(record.is_divided for record in records)
    weights = [1] * len(records) if counts is None else counts
    timed = [(r, weight) for r, weight in zip(records, weights, strict=True) if not r.is_stock_assumed]
    seconds, undivided, stock = (
        sum(weight * getattr(r, name) for r, weight in timed)
        for name in ("seconds", "undivided_seconds", "stock_seconds")
    )
    calls = "One call of each" if counts is None else "All calls of one pass"
    gain = (
        f"{len(records)} convolution{'s' * (len(records) > 1)}, {divided} of them divided. {calls}: "
        f"{seconds * 1e3:.3f} ms predicted, {speed_up(stock, seconds)} the speed of torch's own kernels "
        f"({stock * 1e3:.3f} ms) and {speed_up(undivided, seconds)} that of the best undivided algorithms within the "
        f"limit ({undivided * 1e3:.3f} ms)."
    )
    untimed = len(records) - len(timed)
    if untimed:
        gain = (
            f"{gain if timed else gain.partition('. ')[0] + '.'} {untimed} of them torch's own kernel never computed, "
        )
        gain += "as its scratch memory would exceed the limit: no time of it is known."
    return " ".join(
        (gain, *_saved(records), *_limited(records, weights), *_counted(records), *_explored(records), *_wrong(records))
    )


def _saved(records: Sequence[Record]) -> list[str]:
    divided = [record for record in records if record.is_divided and record.whole_workspace > record.workspace]
    if not divided:
        return []
    most = max(divided, key=lambda record: record.whole_workspace / max(record.workspace, 1))
    used, whole = (max(sizes) for sizes in zip(*((r.workspace, r.whole_workspace) for r in divided), strict=True))
    return [
        f"Workspace of the divided ones: {format_bytes(used)} at most, undivided up to {format_bytes(whole)}, which "
        f"{sum(record.whole_workspace > record.limit for record in divided)} could not have within the limit. Most is "
        f"saved in {_spaced(most.direction)} of {most.problem}: {format_bytes(most.workspace)} instead of "
        f"{format_bytes(most.whole_workspace)}."
    ]


def _limited(records: Sequence[Record], weights: Sequence[int]) -> list[str]:
    pairs = [*zip(records, weights, strict=True)]
    torchs = [weight * r.seconds for r, weight in pairs if r.seconds == r.stock_seconds and r.leader is None]
    whole = sum(weight * record.seconds for record, weight in pairs)
    if not torchs or whole == 0:
        return []
    share = f"{sum(torchs) / whole:.0%}"
    if share == "100%" and len(torchs) < len(records):
        share = "over 99%"
    stay = f"{len(torchs)} of them, {share} of the time, stay{'s' * (len(torchs) == 1)} with torch's own kernel"
    return [f"{stay}, which nothing within the limit beats."]


def _counted(records: Sequence[Record]) -> list[str]:
    """The scratch memory of torch's own kernels, where it is counted, and how many of them exceed the limit."""
    known = [record for record in records if record.stock_workspace is not None]
    if not known:
        return []
    most = max(known, key=lambda record: record.stock_workspace or 0)
    lines = [
        f"Torch's own kernels would take up to {format_bytes(most.stock_workspace or 0)} of scratch memory, in "
        f"{_spaced(most.direction)} of {most.problem}: it counts within the limit."
    ]
    over = sum(record.workspace > record.limit for record in known)
    return [*lines, *([f"{over} of them exceed{'s' * (over == 1)} the limit, as nothing fits it."] if over else [])]


def _wrong(records: Sequence[Record]) -> list[str]:
    return [
        f"Wrong: {algorithm} in {_spaced(record.direction)} of {record.problem} computed {fault}"
        f"{'' if algorithm == 'stock' else '; it is not used there'}."
        for record in records
        for algorithm, fault in record.wrong
    ]


def _stock_workspace(record: Record) -> str:
    return "-" if record.stock_workspace is None else format_bytes(record.stock_workspace)


def _division(record: Record) -> str:
    if not record.leader:
        return record.division
    return f"{record.division}, so far {record.leader}{'' if record.is_stock_assumed else f' {_ratio(record)}x'}"


def _ratio(record: Record) -> str:
    """How many times as fast as torch's own kernel the leader is."""
    ratio = record.stock_seconds / record.leader_seconds
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _explored(records: Sequence[Record]) -> list[str]:
    """The trials of live planning, the time that they cost, and the convolutions that are not settled yet."""
    lines = []
    trials = sum(record.trials for record in records)
    if trials:
        saved = known(replace(record, calls=0) for record in records)
        took = "more" if saved is None or saved < 0 else "less"
        cost = f": they took {abs(saved):.3f} s {took} than torch's own kernels would have" if saved is not None else ""
        lines.append(f"{trials} calls were trials{cost}.")
    untried = sum(record.leader is not None and not record.trials for record in records)
    if untried:
        verb = "were" if untried > 1 else "was"
        lines.append(f"{untried} of them {verb} called too seldom for anything to be tried.")
    exploring = [record for record in records if record.leader is not None and record.trials]
    ahead = [record for record in exploring if record.leader and not record.is_stock_assumed]
    if exploring:
        text = f"Still exploring {len(exploring)} of them, computed by torch's own kernel between trials"
        if ahead:
            best = max(ahead, key=lambda record: record.stock_seconds / record.leader_seconds)
            what = f"{_spaced(best.direction)} of {best.problem}"
            text += f": {best.leader} about {_ratio(best)} times as fast so far in {what}"
        lines.append(f"{text}.")
    return lines


def _narrow_table(title: str | None) -> Table:
    """An empty table whose lines leave most of a terminal to what is in it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _spaced(direction: str) -> str:
    """A direction as words, between which a narrow table may break."""
    return direction.replace("_", " ")


def speed_up(slower: float, faster: float) -> str:
    """A speed-up for people."""
    return f"{slower / faster:.2f}x" if faster > 0 else "-"


def known_tables(contents: Iterable[tuple[dict[str, Any], Sequence[Option]]]) -> list[Table]:
    """The times in a database: a table per environment, in it a row per convolution and algorithm.

    ``contents``: `Store.contents()`; launches whose algorithm is a whole division (its name has a space) are left out.
    """
    tables: dict[str, Table] = {}
    for key, options in contents:
        problem, environment = _split(key)
        if environment not in tables:
            tables[environment] = _known_table(environment)
        by_algorithm: dict[str, list[Option]] = {}
        for option in options:
            if " " not in option.algorithm:
                by_algorithm.setdefault(option.algorithm, []).append(option)
        for algorithm, launches in by_algorithm.items():
            best = min(launches, key=lambda option: option.seconds / option.extent)
            tables[environment].add_row(
                str(problem),
                _spaced(problem.direction),
                algorithm,
                _ranges([option.extent for option in launches]),
                f"{best.seconds / best.extent * 1e3:.3f}",
                str(best.extent),
                format_bytes(best.workspace),
            )
    return list(tables.values())


def _known_table(environment: str) -> Table:
    shown = _narrow_table(environment)
    for heading in ("convolution\nof one sample", "direction", "algorithm", "micro-batches"):
        shown.add_column(heading, overflow="fold")
    for heading in ("least ms\nper sample", "at", "workspace"):
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "1-3 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _split(key: dict[str, Any]) -> tuple[ConvProblem, str]:
    """The problem, of one sample, and the environment in words, from a key of the database."""
    problem = ConvProblem.from_launch_key(key, 1)
    left = {name: value for name, value in key.items() if name not in problem.launch_key()}
    return problem, ", ".join(f"{name} {value}" for name, value in left.items())
