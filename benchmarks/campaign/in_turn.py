"""The random networks of the campaign with their parts in turn, in one process: how many are right, and what is not.

    python benchmarks/campaign/in_turn.py --networks 1000
    python benchmarks/campaign/in_turn.py --networks 200 --first 5000 --memory 2KiB    # nearly all leaves the memory

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch

import distconv
from benchmarks.campaign.networks import Case, draw, draw_with_state
from benchmarks.campaign.training import train
from benchmarks.campaign.trial import Answer, Rank
from distconv.turns import pager

SECONDS = 120
FINE = ("right", "rounding", "unable")


def case_of(seed: int, state: bool = False) -> Case:
    """The case of a seed, under a partition whose parts can come in turn; ``state``: with state in its layers."""
    case = draw_with_state(seed) if state else draw(seed)
    axes = [axis for axis in case["partition"].split(",") if not axis.startswith(("channel", "filter"))]
    partition = ",".join(axes) or ("sample=2", "width=3")[seed % 2]
    return case | {"partition": partition, "compiled": "", "limit": None}


def tried(rank: Rank, case: Case, **options: Any) -> Answer:
    """What becomes of one network; ``options``: of `distconv.in_turn`."""
    torch.backends.mkldnn.set_flags(case["dtype"] != "bfloat16")
    said = rank.alone(case)
    if said:
        return {"outcome": "unable", "said": said}
    try:
        return rank.judged(case, train(case, in_turn={"parts": case["partition"], **options}))
    except distconv.UnsupportedOperation as error:
        return {"outcome": "refused", "said": str(error)}
    except Exception as error:
        return {"outcome": "crash", "said": f"{type(error).__name__}: {error}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first network")
    parser.add_argument("--memory", metavar="BYTES", help="limit of the parts, of which also small tensors leave")
    parser.add_argument("--state", action="store_true", help="layers that change their parameters and buffers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pager.LEAST = 64
    rank, counts = Rank(), Counter[str]()
    for seed in range(options.first, options.first + options.networks):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        answer = tried(rank, case_of(seed, options.state), memory=options.memory)
        faulthandler.cancel_dump_traceback_later()
        counts[answer["outcome"]] += 1
        if answer["outcome"] not in FINE:
            print(f"network {seed}: {answer['outcome']}: {answer.get('said', '')[:300]}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(any(outcome not in FINE for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
