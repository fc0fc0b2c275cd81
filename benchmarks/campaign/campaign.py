"""Random networks on random meshes of 1 to 4 ranks against one process: how many are right, and what is not.

    python benchmarks/campaign/campaign.py --networks 1000            # goes on where it stopped
    python benchmarks/campaign/campaign.py --networks 50 --minutes 1  # whatever comes first
    python benchmarks/campaign/campaign.py --networks 10000 --save    # keeps the table
    python benchmarks/campaign/campaign.py --networks 300 --compiled inductor --save  # compiles every one
    python benchmarks/campaign/campaign.py --networks 1000 --state  # layers change their parameters and buffers
    python benchmarks/campaign/campaign.py --networks 1000 --memory  # each rank in ways that --memory may choose

A network is drawn from its number and `--seed`: one to eight layers or blocks on data of 1 to 3 dims (convolutions of
all kinds, pools, norms, activations, resizing, attention, residuals, concatenations, shared and checkpointed layers,
functions in place), a partition, and a way to run: as a script or by hand, which channel algorithm, which optimizer,
with mucudnn beneath in three of ten, compiled in two of a hundred. It takes two optimizer steps in float64, in one
process and on ranks over Gloo. Compared are losses, gradients of input and parameters, and at the end parameters and
buffers. mucudnn's times are drawn as well, so that every division comes about, not only what is fast on this machine.

    right     within 1e-9 of the largest element, beside one process that compiles nothing, or compiles as the ranks do,
              and the same bits on all ranks; in bfloat16: within four times the error, against float64, of the worse
              of two plain orders of summation
    rounding  above that, but below a hundred times what changes by 1e-13 make of it in one process: of the input, and
              at random of what each layer makes
    wrong     any other number
    refused   UnsupportedOperation, the same on every rank
    crash     another error where one process has none, or errors that differ between ranks
    hang      no answer from a rank within 60 s (compiled: 300 s), or within 6 s of another rank's error, seconds not
              counted in which ranks wait for a busy machine
    unable    torch itself cannot run the network in one process; another one is drawn in its place

One network in four is planned, too, for 6 or 8 ranks on a group that moves nothing, each rank in a process of its own:
what one of them sends must be what the others expect, message by message, or all refuse alike.

What is wrong, crashes or hangs is made as small as possible and written to `--found`, whose files a test replays. The
exit code is 1 where there is such a network, else 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

from benchmarks.campaign.tables import FAULTS, Record, counts, is_fault, tables
from benchmarks.table import RESULTS, conditions, save, show

SEEDS = 1 << 20
"""Numbers of networks between two values of --seed."""

PLANNED = 4
"""Of so many networks one is also planned for more ranks."""


def kept(path: Path, seed: int) -> dict[int, Record]:
    """What earlier runs have found of the networks of a seed, by their numbers."""
    found: dict[int, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["number"] // SEEDS == seed:
            found[record["number"]] = record
    return found


def next_of(numbers: Sequence[int], taken: Any) -> Iterator[int]:
    """Those of the numbers that no other process has taken."""
    while True:
        with taken.get_lock():
            index, taken.value = taken.value, taken.value + 1
        if index >= len(numbers):
            return
        yield numbers[index]


def work(
    numbers: Sequence[int],
    how: tuple[str, bool, bool],
    taken: Any,
    minutes: float,
    shrink: float,
    found: Path,
    results: Any,
) -> None:
    """Runs networks one after the other and puts a record of each; a process of its own.

    Args:
        numbers: of the networks, for all such processes.
        how: they run, as `benchmarks.campaign.trial.How` says.
        taken: how many of them have been taken; shared by the processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one, and this one its ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # before ranks are forked, so that none of them imports it again

    from benchmarks.campaign.judge import Judge, lines, shrunk
    from benchmarks.campaign.plans import Planner
    from benchmarks.campaign.trial import How

    end = time.monotonic() + 60 * minutes
    judge, planner = Judge(), Planner()
    try:
        for number in next_of(numbers, taken):
            if time.monotonic() > end:
                break
            start = time.monotonic()
            case, answer = judge.of_seed(number, How(*how))
            record = {name: case.get(name) for name in ("partition", "limit", "compiled", "dtype")}
            record |= {"number": number, **answer}
            if answer["outcome"] != "unable" and number % PLANNED == 0:
                record["plans"] = planner.of_case(case)
            record["seconds"] = round(time.monotonic() - start, 3)
            if answer["outcome"] in FAULTS and shrink:
                case, answer = shrunk(case, answer, judge, shrink)
                judge.close()
                record["alone"] = judge.of_case(case)["outcome"]  # on new ranks: whether it needs others before it
                found.mkdir(parents=True, exist_ok=True)
                (found / f"{number}.json").write_text(lines(case, answer))
            results.put(record)
        results.put(None)
    except Exception:
        results.put(traceback.format_exc())
        raise
    finally:
        judge.close()
        planner.close()


def measure(options: argparse.Namespace, found: dict[int, Record]) -> None:
    """Adds to ``found``, and to the file, networks until there are enough or the time is over."""
    first = options.seed * SEEDS
    able = sum(record["outcome"] != "unable" for record in found.values())
    left = [n for n in range(first, first + 2 * options.networks + 100) if n not in found]
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    given = left, options.how, context.Value("q", 0), options.minutes, options.shrink
    given = *given, options.found, results
    workers = [context.Process(target=work, args=given) for _ in range(options.pools)]
    for worker in workers:
        worker.start()
    running = len(workers)
    try:
        with options.partial.open("a") as file, tqdm(total=options.networks, initial=able, unit="network") as bar:
            while running and able < options.networks:
                record = results.get()
                if isinstance(record, str):
                    sys.exit(record)
                if record is None:
                    running -= 1
                    continue
                found[record["number"]] = record
                print(json.dumps(record), file=file, flush=True)
                if record["outcome"] != "unable":
                    able += 1
                    bar.update()
                if record["outcome"] in FAULTS:
                    bar.write(f"{record['number']}: {record['outcome']} on {record['partition']}: {record['said']}")
                if record.get("plans", {}).get("outcome") in FAULTS:
                    bar.write(f"{record['number']}: plans on {record['plans']['partition']}: {record['plans']['said']}")
                bar.set_postfix(counts(list(found.values())), refresh=False)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=1000, help="how many, those of earlier runs included")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no further one starts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which networks (%(default)s)")
    parser.add_argument("--pools", type=int, default=2, help="networks at once, each on four ranks (%(default)s)")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds to make a failure smaller, 0: none (%(default)s)"
    )
    parser.add_argument(
        "--found", type=Path, default=ROOT / "tests/distconv/found", help="folder of failures (%(default)s)"
    )
    parser.add_argument(
        "--compiled", choices=("aot_eager", "inductor"), default="", help="every network by this compiler"
    )
    parser.add_argument("--state", action="store_true", help="layers that change their parameters and buffers")
    parser.add_argument("--memory", action="store_true", help="each rank in ways that --memory may choose, drawn")
    parser.add_argument("--shard-parameters", action="store_true", help="all of them, however small, along all axes")
    parser.add_argument(
        "--partial", type=Path, help="what is kept between runs (benchmarks/results/campaign-partial.jsonl)"
    )
    parser.add_argument(
        "--again", type=int, action="append", help="only the network of this number; may be given again"
    )
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    if options.shard_parameters:
        os.environ["DISTCONV_SHARD_PARAMETERS"] = "1"
    options.how = options.compiled, options.state, options.memory
    words = [
        "campaign",
        "state" * options.state,
        "memory" * options.memory,
        "sharded" * options.shard_parameters,
        options.compiled,
    ]
    options.name = "-".join(filter(None, words))
    options.partial = options.partial or RESULTS / f"{options.name}-partial.jsonl"
    return options


def again(numbers: Sequence[int], how: tuple[str, bool, bool]) -> int:
    """Runs single networks anew and prints what they are and what becomes of them."""
    from benchmarks.campaign.judge import Judge, lines
    from benchmarks.campaign.plans import Planner
    from benchmarks.campaign.trial import How

    judge, planner = Judge(), Planner()
    answers = []
    for number in numbers:
        case, answer = judge.of_seed(number, How(*how))
        answers.append(answer)
        print(lines(case, answer) if "layers" in case else answer, end="")
        if answer["outcome"] != "unable":
            answer["plans"] = planner.of_case(case)
            print(f"planned: {answer['plans']}")
    judge.close()
    planner.close()
    return int(any(map(is_fault, answers)))


def main() -> int:
    options = arguments()
    if options.again:
        return again(options.again, options.how)
    told = conditions()
    options.partial.parent.mkdir(exist_ok=True)
    found = kept(options.partial, options.seed)
    measure(options, found)
    records = sorted(found.values(), key=lambda record: record["number"])
    shown = tables(records)
    show(shown)
    if options.save:
        title = "Random networks" + " with state" * options.state + " within limits of memory" * options.memory
        title += f" compiled by {options.compiled}" if options.compiled else ""
        save(options.name, title, f"{__doc__}\n{told}", shown)
    return int(any(map(is_fault, records)))


if __name__ == "__main__":
    sys.exit(main())
