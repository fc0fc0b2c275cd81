"""Table: figures for people, on the terminal and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich import table as rich_table


@dataclass(frozen=True)
class Table:
    """Text cells under headings; the first column is a name, the others are figures."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def rich(self) -> rich_table.Table:
        shown = rich_table.Table(title=self.title)
        for index, heading in enumerate(self.headings):
            shown.add_column(heading, justify="right" if index else "left")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        lines = [self.headings, tuple("--:" if index else ":--" for index in range(len(self.headings))), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
