"""Training steps predicted by the performance model, against the same steps measured on this machine.

    python benchmarks/prediction/prediction.py                     # both tables
    python benchmarks/prediction/prediction.py --only resnet18     # steps of one network
    python benchmarks/prediction/prediction.py --only choice       # what is chosen, against all single partitions

For 1, 2 and 4 ranks the machine is calibrated once. Then the steps of a case, and the kernels from which they are
predicted, are measured in turn, several rounds of them, for the speed of a machine that others use too changes within
seconds. Kernels are measured in as many processes at once as there are ranks, anew in every round. A step is forward
and backward, without loss and optimizer; the slowest rank counts. Of steps and of predictions the median counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn
from tqdm import tqdm

from benchmarks.prediction.cases import CASES, CHOSEN, EVERY
from benchmarks.process import Process
from benchmarks.table import Table, conditions, save, show
from distconv.model.strategy import Strategy
from distconv.performance.automatic import decide
from distconv.performance.candidates import partitions, worthwhile
from distconv.performance.first_call import ModelCall
from distconv.performance.imagined import imagined_job, mesh_of
from distconv.performance.kept import Kept
from distconv.performance.kernels import Measured
from distconv.performance.layers import LayerGraph, trace
from distconv.performance.machine import Machine, read_machine
from distconv.performance.recording import on_meta, record_step
from distconv.performance.replay import replay
from distconv.settings.partition import Partition
from distconv.tensors.refusal import UnsupportedOperation

RESULT = "prediction-cpu"
RANK = Path(__file__).with_name("rank.py")
RANKS = (1, 2, 4)
STEPS = 3
"""Before and after the kernels are measured."""

ROUNDS = 3
"""In which all kernels of a case are measured."""

ONE = {"*": "sample=1"}

Row = dict[str, Any]


class Ranks:
    """A job of so many ranks that waits for requests, and what the machine does for it."""

    def __init__(self, ranks: int, folder: Path, kept: Kept, resources: contextlib.ExitStack) -> None:
        threads = max(1, (os.cpu_count() or 1) // ranks)
        path = folder / f"{ranks}.toml"
        done = subprocess.run(
            [sys.executable, "-m", "distconv", "calibrate", "--nproc", str(ranks), "-o", str(path)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"distconv calibrate: {done.stderr}")
        self._measured = Measured(threads, kept, ranks)
        resources.callback(self._measured.co_runners.close)
        self.machine: Machine = replace(read_machine(str(path)), measured=self._measured, threads=threads)
        store = str(folder / f"store{ranks}")
        self.job = resources.enter_context(
            Process(
                f"{ranks} ranks",
                [[sys.executable, str(RANK), str(rank), str(ranks), store] for rank in range(ranks)],
                OMP_NUM_THREADS=str(threads),
                GLOO_SOCKET_IFNAME="lo",
            )
        )

    def forget(self) -> None:
        """Kernels are measured anew."""
        self._measured.forget(Kept())

    def prepare(self, name: str, strategy: Mapping[str, str]) -> None:
        self.job.ask(do="prepare", case=name, strategy=dict(strategy))

    def steps(self) -> list[float]:
        """Seconds of each."""
        return [float(each) for each in self.job.ask(do="steps", count=STEPS)]


def predicted(name: str, strategy: Mapping[str, str], machine: Machine) -> float:
    case, layers = EVERY[name], Strategy.parse(strategy)
    outer = layers.layers[-1][1]
    with imagined_job(outer.ranks, machine.threads):
        given = None if layers.is_one_partition else layers
        step = record_step(on_meta(case.build), mesh_of(outer), case.shape, strategy=given)
    return replay(step, machine).total


def compared(name: str, strategy: Mapping[str, str], ranks: Ranks) -> tuple[float, float]:
    """Seconds of a step, as measured and as predicted."""
    ranks.prepare(name, strategy)
    measured, expected = ranks.steps(), []
    for _ in range(ROUNDS):
        ranks.forget()
        expected.append(predicted(name, strategy, ranks.machine))
        measured += ranks.steps()
    return statistics.median(measured), statistics.median(expected)


def steps(names: list[str], jobs: Mapping[int, Ranks]) -> Iterator[Row]:
    """Measured and predicted steps."""
    cases = [(name, partition) for name in names for partition in ("sample=1", *CASES[name].partitions)]
    for name, partition in tqdm(cases, desc="steps"):
        measured, expected = compared(name, {"*": partition}, jobs[Partition.parse(partition).ranks or 1])
        yield {
            "network": name,
            "partition": partition,
            "measured": measured,
            "predicted": expected,
            "error": expected / measured - 1,
        }


def choices(jobs: Mapping[int, Ranks]) -> Iterator[Row]:
    """For each small network and number of ranks: what is chosen, beside one process and every single partition."""
    for name, case in tqdm(CHOSEN.items(), desc="choices"):
        model = on_meta(case.build)
        graph = trace(model, case.shape)
        alone = statistics.median(measured_steps(name, ONE, jobs[1]))
        for ranks in RANKS[1:]:
            found = worthwhile(graph, partitions(ranks, len(case.shape)))
            choice = decide(ModelCall(model, graph.inputs, True), graph, found, jobs[ranks].machine, jobs[1].machine)
            candidates: dict[str, float] = {"one process": alone}
            for partition in found:
                if runs(model, graph, partition):
                    took = measured_steps(name, {"*": str(partition)}, jobs[ranks])
                    candidates[str(partition)] = statistics.median(took)
            text = str(choice).partition(";")[0]
            if choice.strategy == ONE:
                candidates[text] = took_by_choice = alone
            elif text in candidates:
                took_by_choice = candidates[text]
            else:
                took_by_choice = statistics.median(measured_steps(name, choice.strategy, jobs[ranks]))
                candidates[text] = took_by_choice
            best = min(candidates, key=lambda each: candidates[each])
            yield {
                "network": name,
                "ranks": ranks,
                "chosen": text,
                "seconds": took_by_choice,
                "predicted": choice.seconds,
                "best": best,
                "best_seconds": candidates[best],
                "alone": alone,
                "candidates": candidates,
            }


def runs(model: nn.Module, graph: LayerGraph, partition: Partition) -> bool:
    """Whether distconv accepts a single partition."""
    with imagined_job(partition.ranks):
        try:
            record_step(model, mesh_of(partition), graph.input)
        except (UnsupportedOperation, ValueError, RuntimeError):
            return False
    return True


def measured_steps(name: str, strategy: Mapping[str, str], ranks: Ranks) -> list[float]:
    ranks.prepare(name, strategy)
    return ranks.steps() + ranks.steps()


def tables(rows: list[Row], chosen: list[Row]) -> list[Table]:
    found = []
    if rows:
        errors = [abs(row["error"]) for row in rows]
        worst = max(rows, key=lambda row: abs(row["error"]))
        title = (
            f"{len(rows)} steps: mean error {100 * statistics.mean(errors):.1f} %, "
            f"worst {100 * worst['error']:+.1f} % ({worst['network']}, {worst['partition']})"
        )
        headings = ("network", "partition", "measured ms", "predicted ms", "error %")
        cells = [
            (row["network"], row["partition"], *_ms(row, "measured", "predicted"), f"{100 * row['error']:+.1f}")
            for row in rows
        ]
        found.append(Table(title, headings, cells))
    if chosen:
        slowest = max(row["seconds"] / row["best_seconds"] for row in chosen)
        title = f"What is chosen, against one process and every single partition: at most {slowest:.2f} times the best"
        headings = ("network", "ranks", "chosen", "ms", "predicted ms", "best", "best ms", "one process ms", "measured")
        cells = [
            (
                row["network"],
                str(row["ranks"]),
                row["chosen"],
                *_ms(row, "seconds", "predicted"),
                row["best"],
                *_ms(row, "best_seconds", "alone"),
                str(len(row["candidates"])),
            )
            for row in chosen
        ]
        found.append(Table(title, headings, cells))
    return found


def _ms(row: Row, *names: str) -> list[str]:
    return [f"{1e3 * row[name]:.1f}" for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=[*CASES, "choice"], help="a part; may be given more than once"
    )
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULT}.md")
    options = parser.parse_args()
    parts = options.only or [*CASES, "choice"]
    about = conditions()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as resources:
        kept = Kept()
        jobs = {ranks: Ranks(ranks, Path(folder), kept, resources) for ranks in RANKS}
        rows = list(steps([name for name in CASES if name in parts], jobs))
        chosen = list(choices(jobs)) if "choice" in parts else []
    found = tables(rows, chosen)
    show(found)
    if options.save:
        save(RESULT, "Predicted and measured steps", about, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
