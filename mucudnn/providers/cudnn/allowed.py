"""Decides which engines cuDNN may use, by torch's settings and by NVIDIA's errata."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.providers.cudnn.backend import NumericalNote
from mucudnn.providers.cudnn.configuration import Configuration

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
