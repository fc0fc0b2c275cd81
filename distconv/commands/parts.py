"""`python -m distconv run --parts`: runs an unmodified script in one process, whose models compute part after part."""

from __future__ import annotations

import argparse
import contextlib

from distconv import private_names, settings
from distconv.job.launcher import BadInput, divides_locally
from distconv.place import Place

_OF_RANKS = (
    *settings.SETTINGS,
    *("strategy", "nproc", "shard_data", "print_all_ranks", "trace", "show_ranks", "report", "summary"),
)
"""The options that are about several ranks."""

_ACCEPTED = ("random", "halo")


def run_in_turn(options: argparse.Namespace, place: Place | None) -> int:
    """Runs the script; its exceptions propagate, as from python itself.

    Raises:
        BadInput: one line, where parts are not accepted, or go with something else that is not.
    """
    if place is not None:
        raise BadInput(f"--parts is for one process, and {place.size} ranks were started; accepted: without a launcher")
    for name in _OF_RANKS:
        if name not in _ACCEPTED and getattr(options, name):
            flag = settings.flag(name)
            raise BadInput(f"--parts with {flag}, which is about several ranks; accepted: one of the two")
    if options.batch_norm != "global":
        raise BadInput("--parts with --batch-norm local; accepted: global, statistics over the whole batch")
    private_names.check()
    from distconv.turns.turning import read_way, script_in_turn
    from mucudnn import program

    try:
        way = read_way(options.parts, options.memory)
        found = program.module(options.script) if options.module else program.script(options.script)
    except (ValueError, program.NotFound) as error:
        raise BadInput(f"--parts: {error}" if isinstance(error, ValueError) else str(error)) from None
    with contextlib.ExitStack() as around:
        around.enter_context(settings.options({name: getattr(options, name) for name in _ACCEPTED}))
        if divides_locally():
            import mucudnn

            around.enter_context(mucudnn.patched())
        around.enter_context(script_in_turn(way))
        found.run(options.arguments)
    return 0
