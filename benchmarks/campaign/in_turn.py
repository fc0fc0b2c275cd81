"""The random networks of the campaign with their parts in turn, in one process: how many are right, and what is not.

    python benchmarks/campaign/in_turn.py --networks 1000
    python benchmarks/campaign/in_turn.py --networks 200 --first 5000 --memory 2KiB    # nearly all leaves the memory
    python benchmarks/campaign/in_turn.py --networks 200 --first 5000 --ways    # as distconv run --memory may choose

A network is that of its number in `benchmarks/campaign/campaign.py`, which tells what the words mean; axes that split
channels are left out of its partition. One that does not end within two minutes ends the program with the lines where
it stands. The exit code is 1 where one is wrong, refused or crashes, else 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch
from torch import nn

import distconv
from benchmarks.campaign.networks import Case, draw, draw_with_state
from benchmarks.campaign.training import train
from benchmarks.campaign.trial import Answer, Rank
from benchmarks.campaign.within import DrawnWays, fitted, kind_of, let_small_leave, without_channels

SECONDS = 120
FINE = ("right", "rounding", "unable")


def case_of(seed: int, state: bool = False) -> Case:
    """The case of a seed, under a partition whose parts can come in turn; ``state``: with state in its layers."""
    return without_channels(draw_with_state(seed) if state else draw(seed)) | {"limit": None}


def tried(rank: Rank, case: Case, changes: Callable[[nn.Module], object]) -> Answer:
    """What becomes of one network; ``changes``: lets its model compute in parts."""
    torch.backends.mkldnn.set_flags(case["dtype"] != "bfloat16")
    said = rank.alone(case)
    if said:
        return {"outcome": "unable", "said": said}
    try:
        return rank.judged(case, train(case, changes=changes))
    except distconv.UnsupportedOperation as error:
        return {"outcome": "refused", "said": str(error)}
    except Exception as error:
        return {"outcome": "crash", "said": f"{type(error).__name__}: {error}"}


def _change(case: Case, options: argparse.Namespace, ways: list[DrawnWays], model: nn.Module) -> None:
    if options.ways:
        ways.append(fitted(case, model))
    else:
        distconv.in_turn(model, case["partition"], memory=options.memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first network")
    parser.add_argument("--memory", metavar="BYTES", help="limit of the parts, of which also small tensors leave")
    parser.add_argument("--ways", action="store_true", help="in a way that --memory may choose, drawn for each network")
    parser.add_argument("--state", action="store_true", help="layers that change their parameters and buffers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    let_small_leave()
    rank, counts, ways = Rank(), Counter[str](), list[DrawnWays]()
    for seed in range(options.first, options.first + options.networks):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        case = case_of(seed, options.state)
        answer = tried(rank, case, partial(_change, case, options, ways))
        faulthandler.cancel_dump_traceback_later()
        counts[answer["outcome"]] += 1
        if answer["outcome"] not in FINE:
            print(f"network {seed}: {answer['outcome']}: {answer.get('said', '')[:300]}", flush=True)
    for counted in (counts, Counter(kind_of(way) for each in ways for way in each.taken)):
        print(", ".join(f"{count} {what}" for what, count in counted.most_common()))
    return int(any(outcome not in FINE for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
