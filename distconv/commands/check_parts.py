"""`python -m distconv check --parts` and `--memory`: what models take in turn, and the ways in which they fit."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distconv import private_names, settings
from distconv.commands.network import named_model, named_script, one_line
from distconv.commands.parts import plan_of, ranks_with_parts
from distconv.job.launcher import BadInput
from distconv.settings.partition import Partition
from mucudnn.commands.output import print_json, show
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from distconv.fitting.choice import Fit
    from distconv.turns.work import Followed


def check_in_turn(options: argparse.Namespace) -> int:
    """Shows what was found; 1 where the parts refuse the model, else 0.

    Raises:
        BadInput: one line, for options that do not go together, and a model that fails in one process,
            or whose data the parts cannot have.
    """
    ranks = _ranks(options)
    from distconv.job.ending import refusal_of
    from distconv.tensors.refusal import UnsupportedOperation
    from distconv.turns.following import follow_call
    from distconv.turns.turning import read_plan

    try:
        with one_line(f"--parts {options.parts}"):
            partition, memory = read_plan(options.parts, options.memory)
        with contextlib.ExitStack() as around:
            with one_line(f"--parts {options.parts}"):
                model, given, _ = around.enter_context(named_model(options))
                alone = follow_call(model, given, {}, None, backward=not options.inference)
            parts = follow_call(model, given, {}, partition, memory, not options.inference, ranks)
    except UnsupportedOperation as error:
        print(f"distconv: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except ValueError as error:
        if (mistake := refusal_of(error)) is None:
            raise
        raise BadInput(mistake) from None
    if options.json:
        asked = {"ranks": ranks and str(ranks), "parts": str(partition), "memory": memory}
        print_json({**asked, **_record(parts), "alone": _record(alone)})
    else:
        print(findings_text(_how(ranks, partition), alone, parts))
    return 0


def check_script_in_turn(options: argparse.Namespace) -> int:
    """Runs a script in turn up to the end of its first optimizer step, or to its own end. Before a model computes
    inputs of new shapes, it is shown what the call takes; 1 where a call is refused or the script fails, else 0.

    Raises:
        BadInput, NotFound: one line, for options that do not go together, and where there is no such script.
    """
    ranks = _ranks(options)
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    from distconv.check.survey import up_to_first_step
    from distconv.tensors.user_lines import in_one_line
    from distconv.turns.following import StateBefore, call_kind, follow_call
    from distconv.turns.turning import read_plan, script_in_turn

    with one_line(f"--parts {options.parts}"):
        plan = read_plan(options.parts, options.memory)
    run = named_script(options)
    calls: list[dict[str, Any]] = []
    known: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()

    def follow(module: nn.Module, args: Any, kwargs: Any, partition: Partition) -> None:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        trained, *others = call_kind(module, inputs)
        of_module, kind = known.setdefault(module, set()), (partition, trained, *others)
        if kind in of_module:
            return
        of_module.add(kind)
        before = StateBefore(module, args, kwargs)
        with before.put_back(trained):
            alone = follow_call(module, args, kwargs, None, backward=trained)
        with before.put_back(trained):
            parts = follow_call(module, args, kwargs, partition, plan[1], trained, ranks)
        name, shapes = type(module).__name__, [tuple(x.shape) for x in inputs]
        found = {"followed": _record(parts), "alone": _record(alone)}
        calls.append({"module": name, "inputs": shapes, "parts": str(partition), **found})
        if not options.json:
            print(findings_text(f"{name}, {_how(ranks, partition)}", alone, parts), flush=True)

    failed = False
    try:
        with script_in_turn(plan, follow), up_to_first_step():
            run()
    except Exception as error:
        failed = True
        print(f"distconv: the script ended with {in_one_line(error)}", file=sys.stderr)
    if options.json:
        print_json(calls)
    elif not calls and not failed:
        print(f"No model of the script can be cut as {options.parts}: all run whole.")
    return int(failed)


def _record(found: Followed) -> dict[str, int]:
    record = asdict(found)
    work = record.pop("work")
    return {**record, **work}


def _ranks(options: argparse.Namespace) -> Partition | None:
    """The partition of the ranks that compute the parts; None: there is one process."""
    if options.channel_algorithm or options.strategy:
        raise BadInput("--parts with --channel-algorithm or --strategy; accepted: --parts without them")
    if options.partition is not None and settings.value("halo"):
        raise BadInput("--parts and --partition with --halo chain: chains begin with a second call; accepted: without")
    private_names.require(private_names.IN_TURN, private_names.FOLLOWED)
    return None if options.partition is None else ranks_with_parts(options.partition)


def _how(ranks: Partition | None, parts: Partition) -> str:
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
    if alone.work.operations:
        times = parts.work.operations / alone.work.operations
        lines.append(f"They do {times:.3f} times the multiplications of one process.")
    return "\n".join(lines)


def check_model_fits(options: argparse.Namespace) -> int:
    """Shows the ways to compute a model's call; 1 where none fits, else 0. BadInput, one line, where it fails."""
    report, fitting = _fitting(options)
    with one_line(f"--memory {options.memory}"), named_model(options) as (model, given, device):
        fitting(model, given, {}, given, device)
    return report.end() or int(not report.calls)  # A line has said why it cannot be followed.


def check_script_fits(options: argparse.Namespace) -> int:
    """Runs a script within the limit up to the end of its first optimizer step, or to its own end, and shows the ways
    to compute each kind of call before it is computed; 1 where none fits or the script fails, else 0.
    """
    report, fitting = _fitting(options)
    from distconv.check.survey import up_to_first_step
    from distconv.tensors.user_lines import in_one_line
    from distconv.turns.turning import script_in_turn

    run = named_script(options)
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
    """``limit``: what is left of the limit beside all that the call does not need itself."""
    from rich.table import Table

    within, caption = "any limit", "The first row is taken."
    if limit != math.inf:
        within = format_bytes(int(max(limit, 0)))
        caption += " The optimizer's state, other models and earlier calls have the rest of the limit."
    table = Table(title=f"{name} within {within}", caption=caption)
    table.add_column("computed")
    for heading in ("at most", "time relative to whole", "moved", "fits"):
        table.add_column(heading, justify="right")
    rows = [
        (str(way), format_bytes(way.peak), f"{way.slower:.2f}", format_bytes(way.moved), "yes" if way.fits else "no")
        for way in ways
    ]
    for row in dict.fromkeys(rows):  # Where no segment gives up memory, one of the ways is whole once more.
        table.add_row(*row)
    return table
