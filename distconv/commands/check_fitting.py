"""`python -m distconv check --memory`: the ways in which models fit a limit of all memory, before anything runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distconv import private_names
from distconv.commands.named_model import Found, Inputs, named_model, one_line
from distconv.commands.parts import plan_of
from mucudnn.commands.output import print_json, show
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from distconv.fitting.choice import Fit


def check_model_fits(options: argparse.Namespace, found: Found, inputs: Inputs) -> int:
    """Shows the ways to compute a model's call; 1 where none fits, else 0. BadInput, one line, where it fails."""
    report, fitting = _fitting(options)
    with one_line(f"--memory {options.memory}"), named_model(options, found, inputs) as (model, given, device):
        fitting(model, given, {}, given, device)
    return report.end() or int(not report.calls)  # A line has said why it cannot be followed.


def check_script_fits(options: argparse.Namespace, script: Callable[[argparse.Namespace], Callable[[], None]]) -> int:
    """Runs a script within the limit up to the end of its first optimizer step, or to its own end, and shows the ways
    to compute each kind of call before it is computed; 1 where none fits or the script fails, else 0.

    ``script``: how the command finds the script that its options name.
    """
    report, fitting = _fitting(options)
    from distconv.check.first_step import up_to_first_step
    from distconv.tensors.user_lines import in_one_line
    from distconv.turns.turning import script_in_turn

    run = script(options)
    try:
        with script_in_turn((fitting, None)), up_to_first_step():
            run()
    except Exception as error:
        print(f"distconv: the script ended with {in_one_line(error)}", file=sys.stderr)
        report.failed = True
    return report.end()


def _fitting(options: argparse.Namespace) -> tuple[_Report, Any]:
    private_names.require(private_names.IN_TURN, private_names.FOLLOWED)
    fitting, _ = plan_of(options)
    report = _Report(options.json)
    fitting.shown = report.add  # type: ignore[union-attr]
    return report, fitting


class _Report:
    """The ways of all calls."""

    def __init__(self, as_json: bool) -> None:
        self._json, self.calls, self.failed = as_json, list[dict[str, Any]](), False

    def add(self, name: str, ways: Sequence[Fit], limit: float) -> None:
        """Shows the ways of a call, the one that is taken first."""
        self.failed |= not ways[0].fits
        rows = [{**asdict(way), "how": str(way), "partition": way.partition and str(way.partition)} for way in ways]
        self.calls.append({"module": name, "limit": None if limit == math.inf else limit, "ways": rows})
        if not self._json:
            show(sys.stdout, _table(name, ways, limit))
            sys.stdout.flush()

    def end(self) -> int:
        """The exit code of the command."""
        if self._json:
            print_json(self.calls)
        return int(self.failed)


def _table(name: str, ways: Sequence[Fit], limit: float) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{name} within {'any limit' if limit == math.inf else format_bytes(int(max(limit, 0)))}",
        caption="The first row is taken.",
    )
    table.add_column("computed")
    for heading in ("at most", "time relative to whole", "moved", "fits"):
        table.add_column(heading, justify="right")
    for way in ways:
        cells = format_bytes(way.peak), f"{way.slower:.2f}", format_bytes(way.moved), "yes" if way.fits else "no"
        table.add_row(str(way), *cells)
    return table
