"""What becomes of one network on a pool of ranks, and the smallest network of which the same becomes."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.campaign.networks import Case
from benchmarks.campaign.trial import Answer, How, Rank
from benchmarks.rank_pool import Failure, Hang, RankPool

RANKS = 4
SECONDS, COMPILED_SECONDS = 60.0, 300.0
"""A network for which a rank gives no answer within so long hangs."""

LIFETIME = 400
"""Networks after which ranks are started anew: each partition's process groups hold threads and connections."""

FAULTS = ("wrong", "crash", "hang")


class Judge:
    """A pool of ranks that runs one network at a time."""

    def __init__(self) -> None:
        self._pool = RankPool(RANKS, Rank)
        self._asked = 0

    def of_seed(self, seed: int, how: How) -> tuple[Case, Answer]:
        """The case of a seed and its outcome."""
        self._renew()
        try:
            (drawn,) = self._pool.ask("draw", seed, how, within=SECONDS, ranks=[0])
        except Hang as hang:
            return {"seed": seed}, {"outcome": "unable", "said": f"torch in one process: {hang}"}
        if isinstance(drawn, Failure):
            raise RuntimeError(drawn.text)
        case, alone = drawn
        return case, {"outcome": "unable", "said": alone} if alone else self._on_ranks(case)

    def of_case(self, case: Case) -> Answer:
        """The outcome of a case."""
        self._renew()
        try:
            (alone,) = self._pool.ask("alone", case, within=SECONDS, ranks=[0])
        except Hang as hang:
            alone = str(hang)
        if alone:
            return {"outcome": "unable", "said": alone.text if isinstance(alone, Failure) else alone}
        return self._on_ranks(case)

    def close(self) -> None:
        """Ends the ranks; the next case starts new ones."""
        self._pool.close()
        self._asked = 0

    def _renew(self) -> None:
        self._asked += 1
        if self._asked > LIFETIME:
            self.close()

    def _on_ranks(self, case: Case) -> Answer:
        def failed(answer: Any) -> bool:
            return isinstance(answer, Failure) or answer["outcome"] in ("refused", "crash")

        try:
            within = COMPILED_SECONDS if case["compiled"] else SECONDS
            answers = self._pool.ask("compare", case, within=within, failed=failed)
        except Hang as hang:
            self._asked = 0
            return {"outcome": "hang", "said": str(hang)}
        found = [{"outcome": "crash", "said": a.text} if isinstance(a, Failure) else a for a in answers]
        answer = together(found[: case["ranks"]])
        if answer["outcome"] in FAULTS:  # what is left of it must not be met by the next network
            self.close()
        if answer["outcome"] == "crash" and case["compiled"]:
            return self._unless_torch_does(case, answer)
        if answer["outcome"] == "wrong" and case["compiled"] == "aot_eager":
            return self._unless_torch_recomputes(case, answer)
        return answer

    def _unless_torch_recomputes(self, case: Case, wrong: Answer) -> Answer:
        """A wrong answer, or that torch is wrong in one process, too, and ranks are right where it recomputes nothing.

        torch's partitioner of minimal cuts reads in backward what a buffer has become (pytorch #197039); what it
        recomputes depends on sizes, so that ranks and one process may be wrong in different numbers.
        """
        try:
            (torch_differs,) = self._pool.ask("compiled_differs", case, within=COMPILED_SECONDS, ranks=[0])
        except Hang:
            return wrong
        if torch_differs is not True:
            return wrong
        answer = self.of_case(case | {"compiled": "aot_eager_default_partitioner"})
        if answer["outcome"] not in ("right", "rounding"):
            return wrong
        return {"outcome": "unable", "said": f"torch's partitioner is wrong in one process, too: {wrong['said']}"}

    def _unless_torch_does(self, case: Case, crash: Answer) -> Answer:
        """A crash of a compiled network, or that torch cannot compile or train it in one process either."""
        try:
            (raised,) = self._pool.ask("compiled_alone", case, within=COMPILED_SECONDS, ranks=[0])
        except Hang:
            return crash
        unable = isinstance(raised, str) and raised
        return {"outcome": "unable", "said": f"torch compiles it in one process: {raised}"} if unable else crash


def together(answers: list[Answer]) -> Answer:
    """One outcome of those of the ranks of a case."""
    failed = [answer for answer in answers if answer["outcome"] in ("refused", "crash")]
    if failed:
        first = failed[0]
        if len(failed) == len(answers) and len({(a["outcome"], a["said"]) for a in failed}) == 1:
            return first
        told = [(a["outcome"], a.get("said", "")[:150]) for a in answers]
        same_kind = len(failed) == len(answers) and {a["outcome"] for a in failed} == {"crash"}
        return first if same_kind else {"outcome": "crash", "said": f"the ranks differ: {told}"[:600]}
    prints = [answer.pop("fingerprints") for answer in answers]
    whole = answers[0] | {"divided": sum(answer["divided"] for answer in answers)}
    unlike = [name for name in prints[0] if len({each.get(name) for each in prints}) > 1]
    if unlike and whole["outcome"] in ("right", "rounding"):
        return whole | {"outcome": "wrong", "said": f"the ranks hold different bits of {', '.join(unlike)}"[:400]}
    return whole


def differing(answer: Answer) -> bool:
    """Whether a gradient or a loss is wrong, and not the state alone."""
    return "gradient" in answer["said"] or "loss" in answer["said"]


def alike(answer: Answer, wanted: Answer) -> bool:
    """Whether an outcome is the same fault, as far as its first words tell."""
    if answer["outcome"] != wanted["outcome"]:
        return False
    if wanted["outcome"] == "wrong":
        return differing(answer) == differing(wanted)
    if wanted["outcome"] != "crash":
        return True
    first, other = (a["said"].split(":")[0] for a in (answer, wanted))
    return first == other


def shrunk(case: Case, answer: Answer, judge: Judge, seconds: float) -> tuple[Case, Answer]:
    """The smallest case found within so many seconds whose outcome is the same; each change is kept if it is."""
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                return case, answer
            now = judge.of_case(smaller)
            if alike(now, answer):
                case, answer, found = smaller, now, True
                break
    return case, answer


PLAIN: Case = {
    "compiled": "",
    "limit": None,
    "policy": "powerOfTwo",
    "channels_last": False,
    "evaluation": False,
    "frozen": False,
    "accumulates": False,
    "optimizer": "SGD",
    "loss": "square",
    "way": "script",
    "algorithm": "auto",
    "dtype": "float64",
    "memory": False,
}
"""The plainest way to run a network."""


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that are a little simpler: fewer layers first, then plainer ways, fewer ranks, and smaller numbers."""
    for layers in _fewer(case["layers"]):
        yield case | {"layers": layers}
    for name, value in PLAIN.items():
        if case.get(name, value) != value:
            yield case | {name: value}
    for partition in _fewer_ranks(case["partition"]):
        ranks = 1
        for part in partition.split(","):
            ranks *= int(part.split("=")[1])
        yield case | {"partition": partition, "ranks": ranks}
    for part in ("shape", "layers"):
        for value in _smaller_numbers(case[part]):
            yield case | {part: value}


def _fewer(layers: list[Any]) -> Iterator[list[Any]]:
    """A list of layers without one of them, at any depth, or with what a block holds in its place."""
    half = len(layers) // 2
    if half > 1:
        yield layers[:half]
        yield layers[half:]
    for index, layer in enumerate(layers):
        yield [*layers[:index], *layers[index + 1 :]]
        if "layers" in layer:
            yield [*layers[:index], *layer["layers"], *layers[index + 1 :]]
            for name in ("layers", "others"):
                for inner in _fewer(layer.get(name, [])):
                    yield [*layers[:index], layer | {name: inner}, *layers[index + 1 :]]


def _fewer_ranks(partition: str) -> Iterator[str]:
    axes = partition.split(",")
    if len(axes) > 1:
        yield from (",".join(axes[:i] + axes[i + 1 :]) for i in range(len(axes)))
    for index, axis in enumerate(axes):
        name, size = axis.split("=")
        for fewer in range(2, int(size)):
            yield ",".join([*axes[:index], f"{name}={fewer}", *axes[index + 1 :]])


def _smaller_numbers(value: Any) -> Iterator[Any]:
    """The same with one of its numbers smaller, or one of its switches off."""
    if isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int):
        yield from dict.fromkeys(n for n in (0, 1, value // 2, value - 1) if 0 <= n < value)
        if value < 0:
            yield 0
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from ([*value[:index], smaller, *value[index + 1 :]] for smaller in _smaller_numbers(item))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (value | {name: smaller} for smaller in _smaller_numbers(item))


def lines(case: Case, answer: Answer) -> str:
    """A case as a file: JSON of a line for each of its parts and layers."""
    kept = copy.deepcopy(case) | {"found": answer["outcome"], "said": answer.get("said", "")}
    layers = ",\n".join(f"  {json.dumps(layer)}" for layer in kept.pop("layers"))
    rest = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in kept.items())
    return f'{{\n "layers": [\n{layers}\n ],\n{rest}\n}}\n'
