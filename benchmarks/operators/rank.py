"""One rank's part of comparing a sample of an operator over shards with one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import distconv
from benchmarks.operators.samples import Module, ModuleSample, Operator, Sample
from distconv.rules import whole as small
from distconv.tensors.mesh import placements

TOLERANCE = 1e-9
"""The largest difference from one process, relative to the largest element, in float64."""

Outcome = tuple[str, str, str]
"""(right, gathered, wrong, refused, crash, or skipped; in which direction; what it said)."""

UNINITIALISED = ("empty", "new_empty")


_seed = torch.manual_seed


def _other_seed(seed: int) -> torch.Generator:
    return _seed(seed + 1)


class Alone:
    """What one process computes of a sample: results, gradients of its inputs, and whether it draws at random."""

    def __init__(self, sample: Sample | ModuleSample, name: str) -> None:
        self.leaves: list[Tensor] = []
        self.sample = sample
        self.failed: str | None = None
        try:
            self.results, self.gradients = run(sample, lambda tensor, _: tensor, self.leaves)
            with mock.patch.object(
                torch, "manual_seed", _other_seed
            ):  # some of torch's functions set a seed themselves
                again, _ = run(sample, lambda tensor, _: tensor, [])
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            return
        self.random = name.startswith(UNINITIALISED) or any(
            difference(a, b) > TOLERANCE for a, b in zip(again, self.results, strict=False)
        )


def run(
    sample: Sample | ModuleSample,
    laid_out: Callable[[Tensor, bool], Tensor],
    leaves: list[Tensor],
    model: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module,
) -> tuple[list[Any], list[Tensor | None]]:
    """Results of a sample and the gradients of its tensors; ``laid_out(tensor, parameter)`` shards one, or does not."""

    def entering(value: Any, parameter: bool = False) -> Any:
        def enter(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = leaf.detach().clone()
            if own.dtype.is_floating_point or own.dtype.is_complex:
                own.requires_grad_()
                leaves.append(own)
            return laid_out(own, parameter)

        return tree_map(enter, value)

    torch.manual_seed(1)
    process: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if isinstance(sample, ModuleSample):
        module = model(sample.build())
        torch.manual_seed(1)
        result = module(*entering(sample.args), **entering(sample.kwargs))
        leaves.extend(module.parameters())
    else:
        first = entering(sample.input)
        if sample.in_place:
            first = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, first)
        args = [entering(value, index in sample.parameters) for index, value in enumerate(sample.args)]
        result = sample.function(first, *args, **entering(sample.kwargs))
        process = sample.process
    results = [dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(process(result))]
    return [r.detach() if isinstance(r, Tensor) else r for r in results], gradients(results, leaves)


def dense(x: Tensor) -> Tensor:
    """The whole tensor."""
    whole = distconv.gather(x)
    return whole if whole.layout == torch.strided else whole.to_dense()


class InBackward(Exception):
    """What an operator's backward raised."""


def gradients(results: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Of a sum of all results, each element with a weight of its own."""
    differentiable = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if not differentiable or not leaves:
        return []
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(r.shape, dtype=torch.float64, generator=generator).to(r.dtype) for r in differentiable]
    try:
        torch.autograd.backward(differentiable, weights)
        return [None if leaf.grad is None else dense(leaf.grad) for leaf in leaves]
    except Exception as error:
        raise InBackward from error


def difference(found: Any, expected: Any) -> float:
    """The largest difference relative to the largest element; infinite where the two are of different kinds."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        same = found == expected or (found != found and expected != expected)
        return 0.0 if type(found) is type(expected) and same else math.inf
    if type(found) is not Tensor or found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return 0.0 if torch.equal(found, expected) else math.inf
    same = (found == expected) | (found.isnan() & expected.isnan())
    gap = torch.where(same, 0, (found - expected).abs()).max()
    usual = torch.where(expected.isfinite(), expected, 0).abs().max().clamp(min=1e-3)
    return float(gap / usual) if not gap.isnan() else math.inf


def sharded(mesh: Any, dims: int) -> bool:
    """Whether a tensor of so many dims has some that the mesh shards."""
    try:
        return any(placement.is_shard() for placement in placements(mesh, dims))
    except ValueError:
        return False


def compare(alone: Alone, partition: str) -> Outcome:
    """This rank's outcome of a sample over a partition."""
    mesh = distconv.init(partition, device_type="cpu")
    sample = alone.sample

    def cut(tensor: Tensor, parameter: bool = False) -> bool:
        # A tensor of fewer dims than the input is a target, an index or a weight, which a script leaves plain.
        plain = parameter or (isinstance(sample, Sample) and tensor.dim() < sample.dims())
        return not plain and tensor.layout == torch.strided and sharded(mesh, tensor.dim())

    def laid_out(tensor: Tensor, parameter: bool) -> Tensor:
        return distconv.shard(tensor, mesh) if cut(tensor, parameter) else tensor

    if any(tensor.layout != torch.strided for tensor, _ in sample.tensors()):
        return "skipped", "", "it has sparse tensors"
    if not any(cut(tensor, parameter) for tensor, parameter in sample.tensors()):
        return "skipped", "", "no tensor of it is sharded"
    if alone.failed is not None:
        return "skipped", "", f"one process: {alone.failed}"
    try:
        with mock.patch.object(small, "_computed_whole", wraps=small._computed_whole) as whole:
            results, found = run(sample, laid_out, [], model=lambda m: distconv.parallelize(copy.deepcopy(m), mesh))
        wrong = _wrong(alone, results, found)
    except Exception as error:
        backward = isinstance(error, InBackward)
        cause = error.__cause__ if backward and error.__cause__ is not None else error
        kind = "refused" if isinstance(cause, distconv.UnsupportedOperation) else "crash"
        return kind, "backward" if backward else "forward", f"{type(cause).__name__}: {cause}"[:400]
    if wrong:
        return "wrong", *wrong
    gathered = sorted({str(call.args[0]) for call in whole.call_args_list})
    return ("gathered", "", f"for {gathered}"[:400]) if gathered else ("right", "", "")


def _wrong(alone: Alone, results: Sequence[Any], found: Sequence[Tensor | None]) -> tuple[str, str] | None:
    if len(results) != len(alone.results):
        return "forward", f"{len(results)} results instead of {len(alone.results)}"
    for here, expected in zip(results, alone.results, strict=True):
        if alone.random and isinstance(expected, Tensor):
            here, expected = torch.empty_like(here).zero_(), torch.empty_like(expected).zero_()
        if not difference(here, expected) <= TOLERANCE:
            return "forward", f"{_told(here)} instead of {_told(expected)}"
    if alone.random:
        return None
    if len(found) != len(alone.gradients):
        return "backward", f"{len(found)} gradients instead of {len(alone.gradients)}"
    for here, expected in zip(found, alone.gradients, strict=True):
        if here is None or expected is None:
            known = here if here is not None else expected
            if known is not None and bool(known.any()):
                return "backward", "a gradient where one process has none, or the other way round"
        elif not difference(here, expected) <= TOLERANCE:
            return "backward", f"{_told(here)} instead of {_told(expected)}"
    return None


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:60]
    return f"{tuple(value.shape)} of {value.dtype}: {value.flatten()[:4].tolist()}"[:150]


class Rank:
    """What a rank answers: it keeps the samples of one entry, and what one process makes of one of them."""

    def __init__(self, entries: Sequence[Operator | Module], most: int, small_bytes: int) -> None:
        small.MOST_BYTES = small_bytes
        self._entries, self._most = entries, most
        self._opened: tuple[int, list[Any]] = (-1, [])
        self._alone: tuple[tuple[int, int], Alone | None] = ((-1, -1), None)

    def open(self, entry: int) -> int:
        """How many samples an entry has."""
        if self._opened[0] != entry:
            self._opened = entry, self._entries[entry].samples(self._most)
            self._alone = (-1, -1), None
        return len(self._opened[1])

    def compare(self, entry: int, sample: int, partition: str) -> Outcome:
        """The outcome of one sample of an entry over a partition."""
        self.open(entry)
        if self._alone[0] != (entry, sample):
            self._alone = (entry, sample), Alone(self._opened[1][sample], self._entries[entry].name)
        alone = self._alone[1]
        assert alone is not None
        return compare(alone, partition)
