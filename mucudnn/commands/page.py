"""One HTML file without links: tables and pictures of chosen plans, or of the times in a database."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from mucudnn.reporting.record import Record
from mucudnn.reporting.run_file import Moment, Outcome
from mucudnn.reporting.tables import summary, table

if TYPE_CHECKING:
    from rich.table import Table

MOST_BARS = 30
"""The number of convolutions that are drawn: those whose calls take torch's own kernel longest."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: left; vertical-align: top; }
td.right, th.right { text-align: right; white-space: nowrap; }
svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) {
  body { background: #1c1c1e; color: #ddd; } th, td { border-color: #444; } svg { background: #fff; }
}
"""
_ROW, _LEFT, _WIDTH = 22, 330, 900


def of_a_run(outcome: Outcome) -> str:
    """The page about a run: its summary, a picture of the times, all convolutions, and the memory of a step."""
    parts = [escape(summary(outcome.records, called=outcome.called)), *map(escape, outcome.notices)]
    body = "".join(f"<p>{part}</p>\n" for part in parts)
    if outcome.records:
        body += f"<h2>Milliseconds of a call</h2>\n{bars(outcome.records)}\n"
        body += f"<h2>Every convolution</h2>\n{as_html(table(outcome.records, wide=True))}\n"
    if outcome.timeline:
        body += f"<h2>Memory of a step</h2>\n{_memory(outcome.timeline)}\n"
    return page("What mucudnn chose", body)


def of_a_database(tables: Sequence[Table], sentence: str) -> str:
    """The page about the times in a database."""
    return page("Times on record", f"<p>{escape(sentence)}</p>\n" + "\n".join(map(as_html, tables)))


def page(title: str, body: str) -> str:
    """An HTML page."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{_STYLE}</style>"
    return f"<!DOCTYPE html>\n<html lang=en><head>{head}</head>\n<body><h1>{title}</h1>\n{body}</body></html>\n"


def as_html(shown: Table) -> str:
    """A table for a terminal, for a browser."""

    def row(kind: str, cells: Sequence[object]) -> str:
        kinds = [f'{kind} class="right"' if column.justify == "right" else kind for column in shown.columns]
        return "".join(f"<{tag}>{escape(str(cell))}</{kind}>" for tag, cell in zip(kinds, cells, strict=True))

    lines = zip(*(column.cells for column in shown.columns), strict=True)
    rows = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in lines)
    title = f"<h3>{escape(str(shown.title))}</h3>\n" if shown.title else ""
    head = row("th", [column.header for column in shown.columns])
    return f"{title}<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"


def bars(records: Sequence[Record]) -> str:
    """For each convolution what torch's own kernel takes, as an outline, and what was chosen, filled: an SVG."""
    drawn = sorted(records, key=lambda record: -record.stock_seconds)[:MOST_BARS]
    scale = (_WIDTH - _LEFT - 90) / max(max(record.stock_seconds, record.seconds) for record in drawn)
    groups = []
    for place, record in enumerate(drawn):
        top, stock, chosen = _ROW * place, scale * record.stock_seconds, scale * record.seconds
        colour = "#e69f00" if record.is_divided else "#9a9a9a" if record.seconds == record.stock_seconds else "#0072b2"
        name = escape(f"{record.direction.replace('_', ' ')} {record.problem}")
        groups.append(
            f"<g><title>{escape(record.division)}</title>"
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{name}</text>'
            f'<rect x="{_LEFT}" y="{top + 5}" width="{chosen:.1f}" height="12" fill="{colour}"/>'
            f'<rect x="{_LEFT}" y="{top + 3}" width="{stock:.1f}" height="16" fill="none" stroke="#555"/>'
            f'<text x="{_LEFT + max(stock, chosen) + 6:.1f}" y="{top + 15}">{record.seconds * 1e3:.3g} of '
            f"{record.stock_seconds * 1e3:.3g}</text></g>"
        )
    grouped = "\n".join(groups)
    height = _ROW * len(drawn) + 24
    legend = (
        f'<text x="{_LEFT}" y="{height - 6}">outline: torch\'s own kernel; orange: divided; blue: another algorithm, '
        "undivided; grey: torch's own</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'font-family="sans-serif" font-size="11">\n{grouped}\n{legend}</svg>'
    )


def _memory(timeline: Sequence[Moment]) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>The picture needs matplotlib: pip install 'mucudnn-distconv[plot]'</p>"
    from mucudnn.networks import pictures

    with pictures.style(), io.StringIO() as drawn:
        pictures.memory_timeline(timeline).savefig(drawn, format="svg")
        return "<svg" + drawn.getvalue().partition("<svg")[2]  # without the head of a file of its own
