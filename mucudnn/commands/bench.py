"""`python -m mucudnn bench`: measures every convolution of a network."""

from __future__ import annotations

import sys
from typing import Any

from mucudnn.commands.arguments import NAMES, USUAL, Commands, add_json, add_network, add_settings, settings, usage
from mucudnn.commands.output import add_wide, print_json, show
from mucudnn.networks import convolutional, find, measure, usual_inputs, whole_inputs, without_data
from mucudnn.reporting.record import to_json
from mucudnn.reporting.tables import summary, table
from mucudnn.timing.store import Store


def add(commands: Commands) -> None:
    """Adds the command."""
    benching = commands.add(
        "bench",
        _bench,
        "measure every convolution of a network",
        "Prints a table per layer and direction: the division within the workspace limit, its time, and its\n"
        "speed-up over the best undivided algorithm within the limit and over torch's own kernel.\n" + NAMES,
        "resnet18 --batch 32",
        "torchvision.models:resnet50 --input 3,224,224 --batch 32 --workspace-limit 256MiB",
        "model.py:Net --input 1,64,64,64 --json",
    )
    add_network(benching)
    add_settings(benching)
    add_json(benching)
    add_wide(benching)


def _bench(arguments: Any) -> int:
    with usage(arguments.parser):
        chosen = settings(arguments)
        build = find(arguments.network)
        sample, batch = usual_inputs(arguments.network, arguments.input, arguments.batch)
        (whole,) = whole_inputs(without_data(build), [sample], batch, USUAL)
        calls = convolutional(build, whole)
    store = Store(chosen.database)
    records = measure(calls, chosen, store)
    store.close()
    if arguments.json:
        named = [{"layer": layer.name, "count": layer.count} for layer in calls]
        print_json([name | values for name, values in zip(named, to_json(records), strict=True)])
    else:
        names = [f"{layer.name}{f' x{layer.count}' if layer.count > 1 else ''}" for layer in calls]
        sentence = summary(records, [layer.count for layer in calls])
        show(sys.stdout, table(records, names, arguments.wide), sentence, wide=arguments.wide)
    return 0
