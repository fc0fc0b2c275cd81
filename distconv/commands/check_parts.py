"""`python -m distconv check --parts`: what models in turn would take, move and repeat."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from distconv import private_names, settings
from distconv.commands.named_model import Found, Inputs, named_model, one_line
from distconv.commands.parts import ranks_with_parts
from distconv.job.launcher import BadInput
from distconv.settings.partition import Partition
from mucudnn.commands.output import print_json
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from distconv.turns.following import Followed
    from distconv.turns.survey import FollowedCall


def check_in_turn(options: argparse.Namespace, found: Found, inputs: Inputs) -> int:
    """Shows what was found; 1 where the parts refuse the model, else 0.

    Raises:
        BadInput: one line, for options that do not go together, and a model that fails in one process.
    """
    ranks = _ranks(options)
    from distconv.tensors.refusal import UnsupportedOperation
    from distconv.turns.automatic import chain_prices, exceeded, extents_of, in_chains, spare
    from distconv.turns.choosing import choose_parts
    from distconv.turns.following import follow_call
    from distconv.turns.turning import read_way

    try:
        with one_line(f"--parts {options.parts}"):
            way, memory = read_way(options.parts, options.memory)
            partition = way if isinstance(way, Partition) else None
        with contextlib.ExitStack() as around:
            with one_line(f"--parts {options.parts}"):
                model, given, device = around.enter_context(named_model(options, found, inputs))
                alone = follow_call(model, given, {}, None, backward=not options.inference)

            def followed(parts: Partition, chained: bool = False) -> Followed:
                with in_chains(chained):
                    return follow_call(model, given, {}, parts, memory, not options.inference, ranks)

            beyond, chained = "", False
            if partition is not None:
                parts = followed(partition)
            else:
                memory = max(spare(device) - alone.whole, 0) if memory is None else memory
                choice = choose_parts(alone, followed, extents_of(given), memory, chain_prices(device))
                partition, parts, chained = choice.partition, choice.taken, choice.chained
                beyond = "" if choice.fits else f"\nBut {exceeded(choice, memory)}."
    except UnsupportedOperation as error:
        print(f"distconv: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if options.json:
        named = None if partition is None else str(partition)
        asked = {"ranks": ranks and str(ranks), "parts": named, "chained": chained, "memory": memory}
        print_json({**asked, **asdict(parts), "alone": asdict(alone)})
    else:
        how = "One process" if partition is None else _how(ranks, partition) + (" in chains" if chained else "")
        print(findings_text(how, alone, parts) + beyond)
    return 0


def check_script_in_turn(
    options: argparse.Namespace, script: Callable[[argparse.Namespace], Callable[[], None]]
) -> int:
    """Runs a script in turn up to the end of its first optimizer step, or to its own end. Before a model computes
    inputs of new shapes, it is shown what the call takes; 1 where a call is refused or the script fails, else 0.

    ``script``: how the command finds the script that its options name.

    Raises:
        BadInput, NotFound: one line, for options that do not go together, and where there is no such script.
    """
    ranks = _ranks(options)
    from distconv.check.first_step import up_to_first_step
    from distconv.tensors.user_lines import in_one_line
    from distconv.turns import turning
    from distconv.turns.survey import Survey

    try:
        way = turning.read_way(options.parts, _limit(options))
    except ValueError as error:
        raise BadInput(f"--parts {options.parts}: {error}") from None
    run = script(options)

    def show(call: FollowedCall) -> None:
        if not options.json:
            print(findings_text(f"{call.module}, {_how(ranks, call.parts)}", call.alone, call.followed), flush=True)

    survey = Survey(way[1], show, ranks)
    failed = False
    try:
        with turning.script_in_turn(way, survey.follow), up_to_first_step():
            run()
    except Exception as error:
        failed = True
        print(f"distconv: the script ended with {in_one_line(error)}", file=sys.stderr)
    if options.json:
        print_json([asdict(call) for call in survey.calls])
    elif not survey.calls and not failed:
        print(f"No model of the script can be cut as {options.parts}: all run whole.")
    return int(failed)


def _limit(options: argparse.Namespace) -> str | int | None:
    """The limit of the parts' memory; where parts are to be chosen and none is named, what is free."""
    if options.parts != settings.AUTO or options.memory is not None:
        return options.memory
    import torch

    from distconv.turns.automatic import spare

    return spare("cuda" if torch.cuda.is_available() else "cpu")


def _ranks(options: argparse.Namespace) -> Partition | None:
    """The partition of the ranks that compute the parts; None: there is one process."""
    if options.channel_algorithm or options.strategy:
        raise BadInput("--parts with --channel-algorithm or --strategy; accepted: --parts without them")
    if options.partition is not None and settings.value("halo"):
        raise BadInput("--parts and --partition with --halo chain: chains begin with a second call; accepted: without")
    private_names.require(private_names.IN_TURN, private_names.FOLLOWED)
    return None if options.partition is None else ranks_with_parts(options.partition, options.parts)


def _how(ranks: Partition | None, parts: Partition | str) -> str:
    return f"{parts}, in turn" if ranks is None else f"first rank of {ranks}, {parts} in turn"


def findings_text(how: str, alone: Followed, parts: Followed) -> str:
    """The findings in a few sentences."""
    share = parts.peak / alone.peak
    lines = [
        f"{how}: the tensors take at most {format_bytes(parts.peak)}, {share:.2f} of the"
        f" {format_bytes(alone.peak)} of one process; {format_bytes(parts.whole)} are parameters, buffers and inputs.",
        f"{format_bytes(parts.spilled)} leave the device, {format_bytes(parts.fetched)} come back, and the parts get"
        f" {format_bytes(parts.exchanged)} from each other.",
    ]
    if parts.sent:
        lines.append(
            f"They send {format_bytes(parts.sent)} to other ranks, besides gradients of parameters and results."
        )
    if alone.operations:
        times = parts.operations / alone.operations
        lines.append(f"They do {times:.3f} times the multiplications of one process.")
    return "\n".join(lines)
