"""python -m distconv run: runs an unmodified script on many ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distconv import settings
from distconv.commands.parts import parts_of_job, ranks_within, run_in_turn, settle_parts
from distconv.job.launcher import BadInput, Job, import_for_ranks, is_launcher, split_process, start
from distconv.job.supervisor import supervise_rank
from distconv.model.choosing import NothingChosen, Question, ask, environment_of_settings
from distconv.model.strategy import Strategy, as_toml, read_strategy
from distconv.place import Place, find_place
from distconv.settings.channels import check_algorithm
from distconv.settings.partition import AXES, Partition
from mucudnn.process import environment

BRIEF = "run a script on many ranks"
DESCRIPTION = f"""\
Runs an unmodified single-device PyTorch script on many ranks. Each rank stores and computes its part of every
activation; the losses are those of one process, to rounding.

A partition names mesh axes and the ranks along each, for example sample=2,height=2 on 4 ranks. Axes: {", ".join(AXES)}.
"""

EXAMPLES = """\
examples:
  python -m distconv run --partition sample=2,height=2 train.py --lr 0.1      4 ranks of this machine
  python -m distconv run --nproc 4 --backend mpi --partition depth=4 train.py
  python -m distconv run --partition sample=4 --shard-data -m package.train   each rank reads a quarter
  mpiexec -n 4 python -m distconv run --partition depth=4 train.py            one or more machines
  torchrun --nproc-per-node 4 -m distconv run --partition height=2,width=2 train.py
  python -m distconv run --partition sample=2,channel=2 train.py              wide layers, without more samples
  python -m distconv run --partition auto --nproc 4 train.py                  what is predicted to be the fastest
  python -m distconv run --memory 24GiB train.py                              whatever it takes, within 24 GiB
  python -m distconv run --parts height=8 decode.py                           eight parts in turn, on one device
  python -m distconv run --partition sample=2 --parts height=4 train.py       two ranks with four parts each

strategy: a table [layers] of "pattern" = "partition", all of the same number of ranks. Patterns are those of the shell,
for the names of model.named_modules(). The first pattern that matches a module, or one around it, decides.
Activations are redistributed between layers. For example:
  [layers]
  "layer4.*" = "channel=4"
  "*" = "sample=4"
"""

AUTOMATIC = """\
--partition auto: the script is started once in one process, up to the first call of its model; the files that it writes
are removed. A step is recorded under partitions into --nproc ranks (default: the cores), and its kernels are measured
here. The chosen partitions are kept for the next start. If one process is predicted to be no slower, the script
runs in one process. Messages are measured once, as by python -m distconv calibrate. Ranks that mpiexec or torchrun
started are all used; if they are on several machines, start calibrate in the same way beforehand.
"""

VARIABLES = """\
  MUCUDNN_WORKSPACE_LIMIT     where set (or MUCUDNN_MEMORY_LIMIT, MUCUDNN_TOTAL_WORKSPACE_SIZE), mucudnn runs the
                              local convolutions within it
  OMP_NUM_THREADS             threads per rank (default: the cores are divided among the ranks)
"""

EXIT_CODES = """\
when a rank fails: one rank reports why, and the others end within ten seconds. Signals reach every rank; a script's own
handlers run after the same optimizer step on all of them, and get 30 seconds.

exit codes: the script's own; 1 for an exception, and for a rank that ended early while others waited for it; 2 for a
job that cannot run as given; 128 + n where signal n ended a rank, or the job: 130 for Ctrl-C, 143 for SIGTERM.
"""

_DEFAULTS = [f"  {s.variable:<27} default of {settings.flag(name)}" for name, s in settings.SETTINGS.items()]
EPILOG = "\n".join([EXAMPLES, AUTOMATIC, "environment:", *_DEFAULTS, VARIABLES, EXIT_CODES])

CHOSEN = "DISTCONV_CHOSEN"
"""The variable through which `distconv run --partition auto` passes the chosen strategy to its ranks."""


def add_options(run: Any) -> None:
    """Adds the options of the command."""
    for name, option in settings.SETTINGS.items():
        how: Any = {"metavar": option.metavar} if option.metavar else {"action": "store_const", "const": "on"}
        run.add_argument(settings.flag(name), dest=name, help=option.meaning.replace("%", "%%"), **how)
    run.add_argument(
        "--strategy", metavar="FILE", help="a TOML file that names layers with another partition; see below"
    )
    run.add_argument(
        "--parts",
        metavar="AXIS=PARTS,... | auto",
        help="one process, or with --partition each rank, computes so many parts of its models' inputs one after "
        "another on its device, for samples that are too large; auto: as --memory alone, which chooses the parts",
    )
    run.add_argument(
        "--memory",
        metavar="BYTES | auto",
        help="the memory that all tensors of the process, or of each rank, may take on its device, such as 24GiB, or "
        "auto for what it has free; to keep within it, models recompute activations in backward, offload them, or "
        "compute in parts. With --parts: the memory of the parts' tensors alone; the least recently read ones are "
        "offloaded to a file or, from a GPU, to the host",
    )
    run.add_argument("--nproc", type=int, metavar="N", help="ranks to start on this machine (default: the partition's)")
    run.add_argument(
        "--shard-data",
        action="store_true",
        help="a DataLoader reads only the samples of this rank, and of volumes in files only its part "
        "(default: every rank reads the whole batch)",
    )
    run.add_argument(
        "--batch-norm",
        choices=["global", "local"],
        default="global",
        help="statistics over the whole batch, as one process has them (default), or over each rank's part",
    )
    run.add_argument("--print-all-ranks", action="store_true", help="show every rank's output, each line after [rank]")
    run.add_argument(
        "--report",
        metavar="FILE",
        help="write mucudnn's choices for rank 0's local convolutions to FILE at the end, as JSON "
        "(python -m mucudnn report FILE shows them)",
    )
    run.add_argument(
        "--summary",
        action=argparse.BooleanOptionalAction,
        help="print at the end, on stderr, the memory of the ranks, what they sent and how long they waited, in two to "
        "four lines (default: on a terminal)",
    )
    run.add_argument(
        "--show-ranks",
        action="store_true",
        help="let the script see RANK, WORLD_SIZE and torch.distributed as they are (default: it sees one process)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module, as with python -m")
    run.add_argument("script", metavar="SCRIPT", help="the script")
    arguments = run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments")
    arguments.required = False  # a message about what is missing does not name it


def _partitions(options: argparse.Namespace) -> tuple[Partition | None, Strategy | None]:
    given: Partition | str | None = settings.value("partition")
    if given == settings.AUTO and options.strategy is not None:
        raise ValueError("--partition auto chooses a strategy: leave out --strategy, or auto")
    chosen = os.environ.get(CHOSEN) if given == settings.AUTO else None
    if given == settings.AUTO and chosen is None:
        return None, None  # the ranks choose when all are connected
    partition = given if isinstance(given, Partition) else None
    path = chosen or options.strategy
    strategy = None if path is None else read_strategy(path, partition.ranks if partition else None)
    if partition is None and strategy is not None:
        partition = strategy.outer
    if partition is None:
        raise ValueError(settings.NO_PARTITION)
    return partition, None if strategy is not None and strategy.is_one_partition and chosen else strategy


@contextlib.contextmanager
def _chosen(options: argparse.Namespace) -> Iterator[None]:
    """A context in which ranks that are started get the strategy that is chosen for the script.

    Raises:
        BadInput: where nothing can be chosen.
    """
    if options.strategy is not None:
        raise BadInput("--partition auto chooses a strategy: leave out --strategy, or auto")
    ranks = options.nproc or os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // ranks))
    kind = "module" if options.module else "script"
    question = Question(
        kind, options.script, ranks, ranks, threads, tuple(options.arguments), options.batch_norm, may_be_one=True
    )
    try:
        answer = ask(question, **environment_of_settings())
    except NothingChosen as error:
        raise BadInput(f"--partition auto: {error}") from None
    print(f"distconv: --partition auto: {answer.sentence}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="distconv-auto-") as folder:
        path = os.path.join(folder, "strategy.toml")
        Path(path).write_text(as_toml(answer.strategy))
        sharded = {settings.SETTINGS["shard_parameters"].variable: "on"} if answer.shard_parameters else {}
        with environment(**{CHOSEN: path}, **sharded):
            yield


def _job(options: argparse.Namespace, place: Place | None) -> Job:
    try:
        partition, strategy = _partitions(options)
        if partition is not None:
            check_algorithm(settings.value("channel_algorithm"), partition)
        backend = settings.value("backend")
    except ValueError as error:
        raise BadInput(str(error)) from None
    started = place.size if place is not None else partition.ranks if partition is not None else None
    # What is chosen may be one process, unless a launcher has started the ranks.
    is_given = place is not None or settings.value("partition") != settings.AUTO
    if is_given and options.nproc is not None and started is not None and options.nproc != started:
        if place is None:
            assert partition is not None, "without a launcher it is given, or has been chosen"
            raise BadInput(
                f"partition {str(partition)!r} needs {partition.ranks} ranks, but --nproc is {options.nproc}"
            )
        raise BadInput(f"--nproc {options.nproc}, but {started} ranks were started already")
    parts, memory = parts_of_job(options, partition)
    return Job(
        partition=partition,
        script=options.script,
        arguments=tuple(options.arguments),
        module=options.module,
        backend=backend,
        shard_data=options.shard_data,
        batch_norm=options.batch_norm,
        strategy=strategy,
        print_all_ranks=options.print_all_ranks,
        report=options.report,
        show_ranks=options.show_ranks,
        summary=options.summary,
        parts=parts,
        memory=memory,
        fitting=options.memory if options.parts is None else None,
    )


def command(options: argparse.Namespace) -> int:
    """Starts the ranks, or is a process that they are forked from or one of them; the exit code of job or script."""
    place = find_place(os.environ)
    if options.nproc is not None and options.nproc < 1:
        raise BadInput(f"--nproc {options.nproc}: accepted: 1 or more")
    for name in settings.SETTINGS:
        if getattr(options, name) is None:
            settings.value(name)  # a variable that is not accepted is named here, not where a script's line needs it
    settle_parts(options)
    is_partitioned = options.partition is not None or (place is not None and settings.value("partition") is not None)
    if (options.parts is not None or options.memory is not None) and not is_partitioned:
        return run_in_turn(options, place)
    with contextlib.ExitStack() as around:
        around.enter_context(settings.options({name: getattr(options, name) for name in settings.SETTINGS}))
        if place is not None or is_launcher():
            return _be_rank(_job(options, place), place)
        if settings.value("partition") == settings.AUTO:
            parts_of_job(options, None)
            around.enter_context(_chosen(options))
        return start(_job(options, None), [sys.executable, "-m", "distconv", *sys.argv[1:]])


def _be_rank(job: Job, place: Place | None) -> int:
    """Parts this process in ranks and what watches them: at a place that a launcher gave it, or in all of the job's."""
    import_for_ranks()
    if place is None:
        watcher = split_process(job)
        if isinstance(watcher, int):
            return watcher
    else:
        watcher = supervise_rank(place, captures=bool(place.rank) and not job.print_all_ranks)
        if isinstance(watcher, int):
            os._exit(watcher)  # at once, so that torchrun sees the rank that failed first end first
    from distconv.job.script import run_script

    found = find_place(os.environ)
    assert found is not None, "a rank's environment names it"
    return run_script(job, found, watcher, ranks_within)
