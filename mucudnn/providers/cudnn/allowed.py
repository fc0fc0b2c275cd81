"""Decides which engines are offered: by torch's settings, NVIDIA's errata, and cuDNN's heuristics, without a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.providers.cudnn.backend import NumericalNote
from mucudnn.providers.cudnn.graph import Configuration

_OPERATIONS = {Role.Y: "ConvFwd", Role.X: "ConvBwdData", Role.W: "ConvBwdFilter"}  # As errata spell them.


def is_deterministic() -> bool:
    """Whether only deterministic algorithms may run now."""
    return torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()


def is_tf32() -> bool:
    """Whether float32 convolutions may be computed in TF32 now."""
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def refusal(problem: ConvProblem, notes: Collection[int]) -> str | None:
    """Why an engine may not serve a problem now, None where it may. The rules are torch's own.

    ``notes``: the engine's numerical notes.
    """
    if NumericalNote.DOWN_CONVERT_INPUTS in notes:
        return "it computes in a narrower type than its inputs have"
    if problem.dtype == "float32" and NumericalNote.TENSOR_CORE in notes and not is_tf32():
        return "it computes in TF32, which torch.backends.cudnn.conv.fp32_precision does not allow"
    if NumericalNote.NONDETERMINISTIC in notes and is_deterministic():
        return "it is not deterministic"
    return None


def erratum(problem: ConvProblem, configuration: Configuration, version: int) -> str | None:
    """The rule of the file named by `CUDNN_ERRATA_JSON_FILE`, which torch heeds too, that excludes a configuration.

    Conditions on shapes and on the card are not evaluated: a rule that might apply excludes the configuration.
    """
    knobs = {f"k{kind}={value}" for kind, value in configuration.knobs}
    for rule in _rules(os.environ.get("CUDNN_ERRATA_JSON_FILE", "")):
        last = int(rule.get("cudnn_version_end", -1))
        if (
            rule.get("operation") == _OPERATIONS[problem.target]
            and int(rule.get("engine", -1)) == configuration.engine
            and knobs.issuperset(rule.get("knob", ()))
            and int(rule.get("cudnn_version_start", 0)) <= version
            and (last == -1 or version < last)
        ):
            return f"erratum {rule.get('rule_id', 'without a name')}"
    return None


@cache
def _rules(path: str) -> tuple[Mapping[str, Any], ...]:
    if not path:
        return ()
    try:
        with open(path) as file:
            return tuple(json.load(file)["rules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"CUDNN_ERRATA_JSON_FILE={path}: {error}") from error


MOST_PROPOSALS = 10
"""Configurations that are offered: the best ranked. Each is timed at least once, unless the cost model rules it out."""

MOST_COMPILED = 2
"""Of them, those whose engines are compiled at run time: a plan takes half a second of a processor and more."""

FIRST = 4  # A list's first proposals, of whatever engines, that are offered beside the first of each further engine.


class Proposal(NamedTuple):
    """A configuration that cuDNN proposes."""

    configuration: Configuration
    compiled: bool = False  # Whether its engine is compiled at run time.
    reason: str | None = None  # Why it may not be offered now; `None` where it may.


def ranked(lists: Iterable[Sequence[Proposal]]) -> list[Proposal]:
    """The proposals of several lists without repetition, in the order of the best rank that each has in a list."""
    ranks: dict[Proposal, int] = {}
    for proposals in lists:
        for rank, proposal in enumerate(_varied(proposals)):
            ranks[proposal] = min(rank, ranks.get(proposal, rank))
    return sorted(ranks, key=ranks.__getitem__)


def _varied(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals without those that differ from better ones in knobs only. `FIRST` counts those that are allowed."""
    found: list[Proposal] = []
    engines: set[int] = set()
    allowed = 0
    for proposal in proposals:
        if allowed < FIRST or proposal.configuration.engine not in engines:
            found.append(proposal)
            allowed += proposal.reason is None
        engines.add(proposal.configuration.engine)
    return found


def offered(proposals: Iterable[Proposal]) -> tuple[list[Proposal], dict[str, str]]:
    """The offered ones of ranked proposals, and by name why others are not offered."""
    found: list[Proposal] = []
    reasons: dict[str, str] = {}
    for proposal in proposals:
        name, compiled = str(proposal.configuration), sum(one.compiled for one in found)
        if proposal.reason is not None:
            reasons[name] = proposal.reason
        elif len(found) >= MOST_PROPOSALS:
            reasons[name] = f"{MOST_PROPOSALS} others are ranked higher"
        elif proposal.compiled and compiled >= MOST_COMPILED:
            reasons[name] = f"{MOST_COMPILED} others that are compiled at run time are ranked higher"
        else:
            found.append(proposal)
    return found, reasons
