"""`python -m mucudnn report`: shows what a run has chosen, or the times in the database."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mucudnn.commands.arguments import Commands, add_json, add_settings, settings, usage
from mucudnn.commands.output import add_wide, print_json, show
from mucudnn.program import NotFound
from mucudnn.reporting.record import Outcome, to_json
from mucudnn.reporting.tables import known_tables, summary, table
from mucudnn.timing.store import Store


def add(commands: Commands) -> None:
    """Adds the command."""
    reporting = commands.add(
        "report",
        _report,
        "show what a run has chosen, or the times in the database",
        "Shows the records that `run --report FILE` wrote, or, without FILE, the times in the database.",
        "plans.json",
        "--database times.sqlite --json",
    )
    reporting.add_argument("file", nargs="?", metavar="FILE", help="the file of `run --report`")
    add_settings(reporting, "database")
    add_json(reporting)
    add_wide(reporting)


def _report(arguments: Any) -> int:
    with usage(arguments.parser):
        if arguments.file is not None:
            outcome = read_outcome(arguments.file)
            if arguments.json:
                print_json(to_json(outcome.records))
            else:
                tables = [table(outcome.records, wide=arguments.wide)] if outcome.records else []
                sentence = summary(outcome.records, called=outcome.called)
                show(sys.stdout, *tables, sentence, *outcome.notices, wide=arguments.wide)
            return 0
        chosen = settings(arguments)
    store = Store(chosen.database)
    contents = store.contents()
    counts = store.counts()
    sentence = f"{store.path} has {counts.launches} launches of {counts.problems} convolutions."
    if arguments.json:
        names = ("extent", "algorithm", "seconds", "workspace")
        launches = [[{name: getattr(each, name) for name in names} for each in options] for _, options in contents]
        print_json([{"key": key, "launches": of} for (key, _), of in zip(contents, launches, strict=True)])
    else:
        show(sys.stdout, *known_tables(contents), sentence, wide=arguments.wide)
    return 0


def read_outcome(path: str) -> Outcome:
    """The outcome that `run --report` wrote. Raises NotFound where the file cannot be read or is something else."""
    try:
        return Outcome.from_json(json.loads(Path(path).read_text()))
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise NotFound(
            f"cannot read {path}: it is not a file that `run --report` wrote ({' '.join(str(error).split())})"
        ) from error
