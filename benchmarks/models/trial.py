"""One model of the zoo under one partition: forward and backward, and its numbers beside those of one process."""

from __future__ import annotations

import copy
import math
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import distconv
from benchmarks.models.entry import IN_TURN, Entry
from distconv.rules import whole as small
from distconv.tensors.user_lines import line_of

small.MOST_BYTES = 0  # the models are tried on small inputs, and shall show what runs on large ones

Numbers = dict[str, Tensor]

TOLERANCE = 1e-9
"""The largest difference, relative to the largest value of a tensor, that float64 may show without a closer look."""

NUDGE = 1e-14
"""By how much inputs are changed, relatively, to see how much a model enlarges rounding."""

ENLARGED = 1e3
"""A difference may be this much larger than the one that the nudge makes in one process."""

FLOOR = 1e-6
"""Gradients of which the largest is smaller than this part of the largest of all count as rounding around zero."""


class Trial:
    """A model built once, and tried under several partitions."""

    def __init__(self, entry: Entry) -> None:
        torch.set_default_dtype(torch.float32)  # some models keep tables that are made in float32 whatever the default
        self.plain = entry.model().double()
        torch.set_default_dtype(torch.float64)
        self.inputs = entry.inputs()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.plain.parameters())

    def attempt(self, partition: str, compare: bool) -> dict[str, Any]:
        """What becomes of one step: result (runs, ok, wrong, refused or crash), and the reason; never an exception.

        Collective where ``compare`` asks for numbers: rank 0 compares. Without several ranks the partition names parts
        that are computed in turn, and numbers are always compared.
        """
        in_turn = partition.startswith(IN_TURN)
        if in_turn:
            found, numbers = self._outcome(lambda: self._in_turn(partition.removeprefix(IN_TURN)))
        else:
            found, numbers = self._outcome(lambda: self._distributed(partition, compare))
        if found["result"] == "runs" and (in_turn or (compare and dist.get_rank() == 0)):
            found |= self.compared(numbers)
        return found

    def _distributed(self, partition: str, compare: bool) -> Numbers:
        mesh = distconv.init(partition, device_type="cpu")
        model = distconv.parallelize(copy.deepcopy(self.plain), mesh)
        numbers = step(model, self.inputs)
        return {name: distconv.gather(value) for name, value in numbers.items()} if compare else numbers

    def _in_turn(self, parts: str) -> Numbers:
        return step(distconv.in_turn(copy.deepcopy(self.plain), parts), self.inputs)

    def _outcome(self, way: Callable[[], Numbers]) -> tuple[dict[str, Any], Numbers]:
        """What becomes of one step, in which time, and its numbers where it has some."""
        began, numbers = time.perf_counter(), {}
        found: dict[str, Any] = {"result": "runs"}
        torch.manual_seed(2)
        try:
            numbers = way()
        except distconv.UnsupportedOperation as error:
            found = {"result": "refused", "reason": str(error), "line": line_of(error)}
        except Exception as error:
            found = {"result": "crash", "reason": f"{type(error).__name__}: {error}"[:2000], "line": line_of(error)}
            found["traceback"] = [
                f"{f.name} in line {f.lineno} of {f.filename.rpartition('/')[2]}"
                for f in traceback.extract_tb(error.__traceback__)[-8:]
            ]
            try:
                self._alone(self.inputs)
            except Exception:  # not distconv's doing
                found["result"] = "fails alone"
        return {**found, "seconds": time.perf_counter() - began}, numbers

    def compared(self, numbers: Numbers) -> dict[str, Any]:
        """ok or wrong, and the largest difference, of a step's numbers from those of one process."""
        expected = self._alone(self.inputs)
        error, where = difference(numbers, expected)
        found: dict[str, Any] = {"result": "ok" if error <= TOLERANCE else "wrong", "error": error}
        if error > TOLERANCE:
            nudged = self._alone([x * (1 + NUDGE * torch.randn_like(x)) for x in self.inputs])
            found["of rounding"] = difference(nudged, expected)[0]
            found["reason"] = f"{where} is off by {error:.1e}"
            if error <= ENLARGED * found["of rounding"]:
                found["result"] = "ok"
        return found

    def _alone(self, inputs: list[Tensor]) -> Numbers:
        torch.manual_seed(2)
        return step(copy.deepcopy(self.plain), inputs)


def step(model: nn.Module, inputs: list[Tensor]) -> Numbers:
    """Outputs, gradients of inputs and parameters, and buffers, after the forward and backward of one loss.

    What a model casts to float32 by itself stays float64 here, so that it can be compared to the last digits.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    with mock.patch.object(Tensor, "float", Tensor.double):
        outputs = [y for y in tree_leaves(model(*inputs)) if isinstance(y, Tensor) and y.is_floating_point()]
        sum(y.square().mean() for y in outputs if y.requires_grad).backward()  # type: ignore[union-attr]
    found = {f"output {place}": y.detach() for place, y in enumerate(outputs, 1)}
    found |= {f"gradient of input {place}": x.grad for place, x in enumerate(inputs, 1) if x.grad is not None}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: b.detach() for name, b in model.named_buffers() if b.is_floating_point()}


def difference(numbers: Numbers, expected: Numbers) -> tuple[float, str]:
    """The largest relative difference, and the name of the tensor that has it; infinite where one lacks a tensor."""
    missing = numbers.keys() ^ expected.keys()
    if missing:
        return math.inf, min(missing)
    largest = max(_largest(value) for name, value in expected.items() if name.startswith("gradient"))
    errors = {name: _error(numbers[name], value, largest) for name, value in expected.items()}
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _error(value: Tensor, expected: Tensor, largest: float) -> float:
    if value.shape != expected.shape:
        return math.inf
    if not value.numel():
        return 0.0
    off = torch.where(value.isnan() & expected.isnan() | (value == expected), 0.0, (value - expected).abs())
    error = float(off.max()) / max(_largest(expected.nan_to_num()), FLOOR * largest, 1e-30)
    return math.inf if math.isnan(error) else error
