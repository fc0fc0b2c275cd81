"""The same layers, cut in the same ways, by several libraries: which of them compute what one process computes.

    python benchmarks/conformance/conformance.py --jax-python PATH    # every case; goes on where it ended
    python benchmarks/conformance/conformance.py --only dilation      # the layers whose names contain this
    python benchmarks/conformance/conformance.py --again crash        # those that crashed before; the others stay
    python benchmarks/conformance/conformance.py --save               # keeps tables and figures in benchmarks/results

A case is a layer, with its geometry, under one partition of its input into 2 or 4 parts: forward, the gradient of the
input and those of all parameters, in float64, beside stock torch in one process. The libraries:

    distconv     `parallelize` and `shard`; what it would gather because it is small counts as refused
    dtensor      torch's DTensor: `distribute_tensor`, `distribute_module` with replicated parameters; where channels
                 are cut, also with parameters cut along them, and the better of the two counts
    jax          `jit` of arrays with a `NamedSharding`; XLA's partitioner does the rest; the layers are written anew in
                 JAX, and each is first compared with torch's on one device
    shardtensor  PhysicsNeMo's ShardTensor: a plain module, called with a sharded input. Its sharded layers, which the
                 package registers only where there is a GPU, are registered by the function that it has for this
    lbann        LBANN's DistConv for PyTorch: `DistConvDDP` and `DCTensor`; samples are cut by data parallelism

JAX has devices of one process, the others real ranks over Gloo.

Each is used as its documentation tells to use it, without a layout that is changed by hand inside a layer. JAX (pip
install '.[jax]') and PhysicsNeMo (pip install nvidia-physicsnemo) may live in environments of their own (--jax-python,
--shardtensor-python); LBANN's is a checkout of github.com/LBANN/DistConv (--lbann). What there is not is left out.

    right    output and all gradients equal to one process within 1e-9 of the largest element, on every rank
    wrong    numbers or shapes that differ
    refused  an error that says what is not supported, on every rank
    crash    any other error, or one that not every rank has
    hang     no answer within 45 s, or within 6 s of another rank's error
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

from benchmarks.conformance.cases import Case, cases
from benchmarks.conformance.judge import write
from benchmarks.conformance.peers import LIBRARIES, Peer, missing
from benchmarks.conformance.reference import Reference
from benchmarks.conformance.tables import OUTCOMES, about, tables
from benchmarks.table import RESULTS, save, show

PARTIAL = RESULTS / "conformance-partial.jsonl"

Key = tuple[str, str, str]
"""(library, layer, partition)."""

Record = dict[str, Any]


def kept(path: Path) -> dict[Key, Record]:
    """What earlier runs have found; a case that was run again comes after the one that it replaces."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(r["library"], r["layer"], r["partition"]): r for r in records}


def measure(options: argparse.Namespace, found: dict[Key, Record]) -> None:
    """Adds to ``found``, and to the file, the cases that are asked for."""
    peers = []
    places = {"jax": options.jax_python, "shardtensor": options.shardtensor_python, "lbann": options.lbann}
    for name in options.library:
        where = places.get(name, sys.executable)
        if absent := missing(name, where):
            print(absent, file=sys.stderr)
        else:
            peers.append(Peer(name, where))
    chosen = [(family, case) for family, case in cases() if _chosen(case, options)]
    with tempfile.TemporaryDirectory() as directory, options.partial.open("a") as file:
        asked: Reference | None = None
        try:
            for family, case in tqdm(chosen, unit="case", disable=not sys.stderr.isatty()):
                for peer in peers:
                    key = (peer.name, case.layer.name, case.partition)
                    if key in found and found[key]["outcome"] not in options.again:
                        continue
                    if asked is None or asked.layer != case.layer:
                        asked = Reference(case.layer)
                        write(Path(directory, "given.npz"), asked.given)
                        write(Path(directory, "expected.npz"), asked.expected)
                    outcome, said = peer.outcome(case, Path(directory), asked.expected)
                    told = {"outcome": outcome, "said": said, "versions": peer.versions}
                    named = {"library": peer.name, "family": family, "layer": case.layer.name}
                    date = str(datetime.date.today())
                    found[key] = {**named, "partition": case.partition, "date": date, **told}
                    print(json.dumps(found[key]), file=file, flush=True)
        finally:
            for peer in peers:
                peer.close()


def _chosen(case: Case, options: argparse.Namespace) -> bool:
    return (not options.only or any(part in case.layer.name for part in options.only)) and (
        not options.partition or case.partition in options.partition
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="layers whose names contain this; may be given again")
    parser.add_argument("--partition", action="append", help="only under this partition; may be given again")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="only this one; may be given again")
    parser.add_argument("--jax-python", metavar="PATH", default=sys.executable, help="a python that has jax")
    parser.add_argument(
        "--shardtensor-python", metavar="PATH", default=sys.executable, help="a python that has nvidia-physicsnemo"
    )
    parser.add_argument("--lbann", metavar="DIR", default="", help="a checkout of LBANN/DistConv")
    parser.add_argument("--again", action="append", default=[], choices=OUTCOMES, help="repeat cases of this outcome")
    parser.add_argument("--partial", type=Path, default=PARTIAL, help="what is kept between runs (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write tables and figures to benchmarks/results")
    options = parser.parse_args()
    options.library = options.library or list(LIBRARIES)
    return options


def main() -> None:
    options = arguments()
    options.partial.parent.mkdir(exist_ok=True)
    found = kept(options.partial)
    measure(options, found)
    order = {(case.layer.name, case.partition): place for place, (_, case) in enumerate(cases())}
    listed = [r for r in found.values() if (r["layer"], r["partition"]) in order and r["library"] in options.library]
    records = sorted(listed, key=lambda r: order[r["layer"], r["partition"]])
    shown = tables(records)
    show(shown)
    if options.save:
        save("conformance", "The same layers by several libraries", about(records, __doc__ or ""), shown)


if __name__ == "__main__":
    main()
