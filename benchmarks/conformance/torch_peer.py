"""A library for torch that computes cases on ranks over Gloo: reads a request per line, prints an answer to each.

python benchmarks/conformance/torch_peer.py distconv 4    # or dtensor; so many ranks

A library's arm is a module with `versions()`, `begin()`, `WAYS`, `compute(...)` and `refused(error)`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist

from benchmarks.conformance.cases import Layer
from benchmarks.conformance.judge import read, write
from benchmarks.conformance.layers import build
from benchmarks.rank_pool import Failure, Hang, RankPool

ANSWER_SECONDS = 45.0
"""A case for which no rank answers within so long hangs."""

SAID_LENGTH = 400

Answer = tuple[str, str]
"""(done, refused or crash; what the library said)."""


class Rank:
    """What a rank answers."""

    def __init__(self, arm: Any) -> None:
        self._arm = arm
        arm.begin()

    def compute(self, request: dict[str, Any]) -> Answer:
        """One case; the numbers go to a file of this rank."""
        given = {name: torch.from_numpy(value) for name, value in read(Path(request["given"])).items()}
        module = build(Layer(**request["layer"]))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(given[f"parameter {name}"])
        try:
            found = self._arm.compute(module, given["input"], given["grad"], request["partition"], request["way"])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return "refused" if self._arm.refused(error) else "crash", " ".join(said.split())[:SAID_LENGTH]
        arrays = {name: tensor.detach().numpy() for name, tensor in found.items() if tensor is not None}
        write(Path(f"{request['found']}-{dist.get_rank()}.npz"), arrays)
        return "done", ""


def together(answers: list[Answer | Failure]) -> Answer:
    """What all ranks' answers are as one: a crash where they differ."""
    told: list[Answer] = [("crash", answer.text) if isinstance(answer, Failure) else answer for answer in answers]
    kinds = {kind for kind, _ in told}
    if len(kinds) == 1:
        return told[0]
    kind, said = next(answer for answer in told if answer[0] != "done")
    return "crash", f"not on every rank: {kind}: {said}"


def answer(pool: RankPool, request: dict[str, Any]) -> Answer:
    """The ranks' answer to a request; a hang, or a crash where a rank died."""

    def failed(answer: Answer | Failure) -> bool:
        return isinstance(answer, Failure) or answer[0] != "done"

    try:
        answers = pool.ask("compute", request, within=ANSWER_SECONDS, failed=failed)
    except Hang as hang:
        return "crash" if str(hang).endswith("died") else "hang", str(hang)
    found = together(answers)
    if found[0] == "crash":
        pool.close()  # messages that are still under way would meet those of the next case
    return found


def main() -> None:
    name, ranks = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    arm = importlib.import_module(f"benchmarks.conformance.{name}_arm")
    pool = RankPool(int(ranks), lambda: Rank(arm))
    for line in sys.stdin:
        request = json.loads(line)
        told = {"versions": arm.versions(), "ways": arm.WAYS} if request == {"do": "tell"} else answer(pool, request)
        print(json.dumps(told), file=answers, flush=True)
    pool.close()


if __name__ == "__main__":
    main()
