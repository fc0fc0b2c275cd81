"""`python -m mucudnn plan`: plans a network within limits from recorded times, on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from mucudnn.commands.arguments import Commands, Parser, add_json, add_settings, settings, usage
from mucudnn.commands.network import NAMES, add_network, layers_of
from mucudnn.commands.output import add_wide, print_json, show
from mucudnn.networks import layers
from mucudnn.networks.layers import LayerCall
from mucudnn.networks.plan import NetworkPlan, plan
from mucudnn.planning.on_record import RecordedTimes, times
from mucudnn.program import NotFound
from mucudnn.reporting.record import to_json
from mucudnn.reporting.tables import table
from mucudnn.settings import SettingError, Settings
from mucudnn.timing.logbook import Environment
from mucudnn.timing.store import Store


def add(commands: Commands) -> None:
    """Adds the command."""
    planning = commands.add(
        "plan",
        _plan,
        "say how a network would be computed within limits, by times on record",
        "Prints, per layer and direction, the division that is fastest by the times in the database: within --limit\n"
        "for each convolution, or, with --total, for all together, each having a workspace of its own. Nothing is\n"
        "measured unless --measure is given, so the times may come from another machine.\n" + NAMES,
        "resnet50 --batch 32 --limit 64MiB",
        "resnet50 --batch 32 --total 512MiB --database times-of-the-cluster.sqlite --machine H100",
        "model.py:Net --input 1,64,64,64 --total 1GiB --measure",
    )
    add_network(planning)
    add_settings(planning)
    add_recorded(planning)
    add_json(planning)
    add_wide(planning)


def add_recorded(parser: Parser) -> None:
    """The options that say which times are taken."""
    parser.add_argument(
        "--machine",
        metavar="TEXT",
        help="take the times whose environment contains TEXT (default: those of this machine, else the most complete)",
    )
    parser.add_argument("--measure", action="store_true", help="first measure missing times, on this machine")


def _plan(arguments: Any) -> int:
    with usage(arguments.parser):
        chosen = settings(arguments)
        calls, known = recorded_network(arguments, chosen)
    found = plan(calls, known, chosen)
    if arguments.json:
        print_json(_plain(found, known))
    else:
        names = [f"{row.layer.name}{f' x{row.count}' if row.count > 1 else ''}" for row in found.rows]
        records = [row.record for row in found.rows]
        shown = table(records, names, arguments.wide)
        show(sys.stdout, f"times: {known.name}", shown, *found.sentences(), *missing(found), wide=arguments.wide)
    return 0 if found.rows else 1


def recorded_network(arguments: Any, chosen: Settings) -> tuple[list[LayerCall], RecordedTimes]:
    """The convolutions, and the times on which the command is to decide; what is missing is measured where asked for.

    Without `--batch`, and where nothing is on record for the network's usual number of samples, it is the number on
    record, as a line on stderr reports.

    Raises:
        NotFound: where there are none.
        SettingError: where torch's own scratch memory is to count, which is not on record.
    """
    if chosen.count_stock:
        raise SettingError("count_stock=on: accepted here is off, as a database does not keep what torch's kernels use")
    calls, store = layers_of(arguments), Store(chosen.database)
    if arguments.measure:
        layers.measure(calls, chosen, store)
    every = times(store.contents())
    store.close()
    wanted = [entry for entry in every if arguments.machine is None or arguments.machine in entry.name]
    if not wanted:
        raise NotFound(
            f"{store.path} has no times"
            + (f" of --machine {arguments.machine}: there are " + "; ".join(e.name for e in every) if every else "")
            + ": `python -m mucudnn bench` or plan --measure measures"
        )
    known = _best(wanted, calls)
    if arguments.batch is None and not any(known.knows(layer.problem) for layer in calls):
        counts = Counter(batch for entry in wanted for layer in calls for batch in entry.batches(layer.problem))
        if counts:
            batch = max(counts, key=lambda batch: (counts[batch], batch))
            print(f"{arguments.parser.prog}: the batch size on record is {batch}; --batch sets it", file=sys.stderr)
            calls = layers_of(arguments, batch)
            known = _best(wanted, calls)
    return calls, known


def _best(wanted: list[RecordedTimes], calls: list[LayerCall]) -> RecordedTimes:
    """The times of this machine, else the most complete ones."""
    here = Environment.current(torch.device("cpu")).launch_key()
    return max(
        wanted,
        key=lambda entry: (
            entry.environment == here and any(entry.knows(layer.problem) for layer in calls),
            sum(entry.knows(layer.problem) for layer in calls),
        ),
    )


def missing(found: NetworkPlan) -> list[str]:
    """A sentence that names the convolutions without times on record; no sentence if there are none."""
    if not found.missing:
        return []
    names = list(dict.fromkeys(f"{layer.name} ({layer.problem})" for layer in found.missing))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    known = len({row.layer for row in found.rows})
    return [
        f"Left out: {len(found.missing)} of {len(found.missing) + known} convolutions, of which torch's own kernel was "
        f"never timed on so many samples: {shown}. `--measure` measures them here."
    ]


def _plain(found: NetworkPlan, known: RecordedTimes) -> dict[str, Any]:
    records = to_json([row.record for row in found.rows])
    return {
        "environment": known.environment,
        "seconds": found.seconds,
        "stock_seconds": found.stock_seconds,
        "workspace": found.workspace,
        "gap": None if found.sharing is None else found.sharing.gap,
        "sentences": found.sentences(),
        "missing": [
            {"layer": layer.name, "direction": str(layer.problem.direction), "convolution": str(layer.problem)}
            for layer in found.missing
        ],
        "plans": [
            {
                "layer": row.layer.name,
                "count": row.count,
                "desirable": [[each.seconds, each.workspace] for each in row.choices.desirable],
            }
            | record
            for row, record in zip(found.rows, records, strict=True)
        ],
    }
