"""`python -m mucudnn plot`: draws the plan of a network, and the memory of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mucudnn.commands.arguments import Commands, add_settings, settings, usage
from mucudnn.commands.network import NAMES, add_network
from mucudnn.commands.plan import add_recorded, missing, recorded_network
from mucudnn.commands.report import read_outcome
from mucudnn.networks.plan import plan
from mucudnn.program import NotFound

FORMATS = ("png", "svg")


def add(commands: Commands) -> None:
    """Adds the command."""
    plotting = commands.add(
        "plot",
        _plot,
        "draw desirable sets, time against workspace, the division of a network, and a run's memory",
        "Writes pictures, as PNG and SVG, of a network's plan by the times on record (see plan --help):\n"
        "  desirable   the desirable sets of the kernels that gain most, and what was chosen\n"
        "  workspace   time against workspace, of each kernel and of the network\n"
        "  division    what each kernel is divided into, its time and its workspace\n"
        "and, with --report, of what a run wrote:\n"
        "  timeline    live memory, workspace and budget at each convolution of a step\n" + NAMES,
        "alexnet --batch 32 --limit 64MiB --output pictures",
        "resnet50 --batch 32 --total 512MiB --database times-of-the-cluster.sqlite --machine H100",
        "--report plans.json",
    )
    add_network(plotting, nargs="?")
    add_settings(plotting)
    add_recorded(plotting)
    plotting.add_argument("--report", metavar="FILE", help="the file of `run --report`, for the memory of a step")
    plotting.add_argument("--output", metavar="FOLDER", default=".", help="where the pictures go (default: here)")


def _plot(arguments: Any) -> int:
    with usage(arguments.parser):
        if arguments.network is None and arguments.report is None:
            raise NotFound("give a NETWORK, or --report FILE")
        if importlib.util.find_spec("matplotlib") is None:
            raise NotFound("pictures need matplotlib: pip install 'mucudnn-distconv[plot]'")
        from mucudnn.networks import pictures

        drawn: dict[str, Callable[[], Any]] = {}
        notices: list[str] = []
        if arguments.network is not None:
            chosen = settings(arguments)
            found = plan(*recorded_network(arguments, chosen), chosen)
            notices = missing(found)
            if found.rows:
                drawn |= {
                    "desirable": lambda: pictures.desirable_sets(found),
                    "workspace": lambda: pictures.workspace_curves(found),
                    "division": lambda: pictures.network_division(found),
                }
        if arguments.report is not None:
            timeline = read_outcome(arguments.report).timeline
            if not timeline:
                raise NotFound(f"{arguments.report} has no timeline: a run records one where its limit is `peak`")
            drawn["timeline"] = lambda: pictures.memory_timeline(timeline)
        folder = Path(arguments.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with pictures.style():
                for name, draw in drawn.items():
                    figure = draw()
                    for suffix in FORMATS:
                        figure.savefig(folder / f"{name}.{suffix}")
                        print(folder / f"{name}.{suffix}")
        except OSError as error:
            raise NotFound(f"cannot write to --output {folder}: {error.strerror}") from error
    for sentence in notices:
        print(sentence)
    return 0 if drawn else 1
