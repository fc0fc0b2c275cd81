"""Computes parts of a convolution by cuDNN, in the memory format and with the alignment that the plan expects.

Where the operands' own memory is so, plans are looked up once for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part, Tile
from mucudnn.providers.cudnn.form import Form, form
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.providers.provider import Provider

if TYPE_CHECKING:
    from mucudnn.providers.cudnn.card import Card


@dataclass(frozen=True, eq=False)
class Prepared:
    """A convolution by one algorithm, ready to run on any addresses. It is only read, so threads may share it."""

    form: Form
    workspace: int  # Bytes that the algorithm itself needs.
    execute: Callable[[c_void_p, int, int, int, int], None]
    """A function of a handle and the addresses of x, w, y and the workspace."""
    alignment: int = 1  # Bytes that all addresses must be multiples of.


class CudnnProvider(Provider):
    """A provider whose launches are plans of cuDNN."""

    def __init__(self, place: Card) -> None:
        """``place``: where the plans run."""
        self.place = place

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> Prepared:
        """An algorithm for a problem. Raises CudnnError where it does not serve it.

        ``accumulate``: whether to add to the target rather than overwrite it.
        """
        raise NotImplementedError

    def _with_refusals(self, found: dict[str, str], problem: ConvProblem, names: Iterable[str]) -> dict[str, str]:
        """Reasons why algorithms are not offered, and those that cuDNN gives for others, which takes plans."""
        for name in names:
            try:
                self.workspace(problem, name)
            except CudnnError as error:
                found.setdefault(name, str(error))
        return found

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        try:
            self.workspace(problem, algorithm)
        except CudnnError:
            return False
        return True

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        place = self.place
        first, w, bias = parts[0].problem, parts[0].w, parts[0].bias
        is_sum = first.target is Role.W
        # A target that is copied is computed by itself and then added; so are parts of a half type in a float32 sum, as
        # no engine of cuDNN 9.19 or 9.28 adds products of half types to float32 in memory.
        is_apart = first.formats[_ROLES.index(first.target)] == "strided" or (
            is_sum and first.is_half and w.dtype is torch.float32
        )
        adds_first, size = accumulate, 0
        runs: list[tuple[Part, Prepared]] = []
        for part in parts:
            beta = accumulate and not is_apart
            key = self, algorithm, beta
            prepared: Prepared | None = part.kept.get(key)
            if prepared is None:
                prepared = part.kept[key] = self.prepared(part.problem, algorithm, beta)
            union = _union(part, prepared.form, is_apart)
            if union & (prepared.alignment - 1):
                prepared = _misaligned(self, prepared, part, algorithm, beta, union & -union)
            if prepared.workspace > size:
                size = prepared.workspace
            runs.append((part, prepared))
            accumulate = is_sum
        with place.current():
            scratch = place.scratch(size) if size else None
            workspace = scratch.data_ptr() if scratch is not None else 0
            handle = place.handle()
            for number, (part, prepared) in enumerate(runs):
                _run(prepared, handle, part, workspace, is_sum and (number > 0 or adds_first))
                if bias is not None:
                    part.result.add_(bias.view(-1, *(1,) * first.dims))

    def ready(self, algorithm: str, tiles: Sequence[Tile], accumulate: bool) -> Callable[[Operands], bool]:
        return ReadyLaunch(self, algorithm, tiles, accumulate).run


_ROLES = tuple(Role)


def _union(part: Part, form: Form, is_apart: bool) -> int:
    """The addresses of all tensors that are not copied, or-ed: the lowest bit is their alignment."""
    union = 0
    for role in Role:
        if role not in form.copied and not (is_apart and role is part.problem.target):
            union |= getattr(part, role).data_ptr()
    return union


def _misaligned(
    provider: CudnnProvider, expected: Prepared, part: Part, algorithm: str, accumulate: bool, alignment: int
) -> Prepared:
    """The algorithm, prepared for addresses with a smaller alignment.

    Raises:
        RuntimeError: where it does not serve them, or not within the workspace that was promised.
    """
    key = provider, algorithm, accumulate, alignment
    found: Prepared | None = part.kept.get(key)
    if found is None:
        found = provider.prepared(replace(part.problem, alignment=alignment), algorithm, accumulate)
        part.kept[key] = found
    if found.workspace > expected.workspace:
        raise RuntimeError(
            f"at addresses that are multiples of {alignment} it needs {found.workspace} bytes, not {expected.workspace}"
        )
    return found


def _run(prepared: Prepared, handle: c_void_p, part: Part, workspace: int, accumulate: bool) -> None:
    """Computes a part, on copies of those tensors that have another memory format or dtype.

    ``accumulate``: whether a target that is copied is added to, rather than overwritten.
    """
    form, problem = prepared.form, part.problem
    dtype: torch.dtype = getattr(torch, problem.dtype)
    tensors: dict[str, torch.Tensor] = {}
    for role, shape in zip(Role, form.shapes, strict=True):
        given: torch.Tensor = getattr(part, role)
        if role in form.copied or given.dtype is not dtype:
            source = _shaped(given, problem.dims)
            given = torch.empty(shape, dtype=dtype, device=given.device, memory_format=form.memory_format)
            if role is not problem.target:
                given.copy_(source)
        tensors[role] = given
    x, w, y = (tensors[role].data_ptr() for role in Role)
    prepared.execute(handle, x, w, y, workspace)
    target = part.result
    if tensors[problem.target] is target:
        return
    result = tensors[problem.target].squeeze(2) if problem.dims == 1 else tensors[problem.target]
    if accumulate:
        target.add_(result)
    else:
        target.copy_(result)


def _shaped(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The tensor, with a second spatial dim if it has only one."""
    return tensor.unsqueeze(2) if dims == 1 else tensor


Plan = tuple[Callable[[c_void_p, int, int, int, int], None], int, int]
"""A part's plan as a function to call, and the offsets of its x and y in bytes."""


class ReadyLaunch:
    """One algorithm on consecutive parts.

    A call is on the way of every convolution of the program: it computes three addresses and executes the plans. Its
    code is flat, because a program's next convolution finds it outside the processor's caches.
    """

    def __init__(self, provider: CudnnProvider, algorithm: str, tiles: Sequence[Tile], accumulate: bool) -> None:
        """``accumulate``: as `Provider.launch` takes it."""
        self._place, self._provider, self._algorithm = provider.place, provider, algorithm
        self._tiles, self._accumulate = tiles, accumulate
        first = tiles[0].problem
        self._dtype: torch.dtype = getattr(torch, first.dtype)
        self._bias_shape = -1, *(1,) * first.dims
        self._target = str(first.target)
        self._at, self._length = tiles[0].at, sum(tile.extent for tile in tiles)
        self._start = (tiles[0].x if first.target is Role.X else tiles[0].y)[0]
        self._prepared: Sequence[Prepared] = ()
        self._plans: Sequence[Plan] | None = None
        self._workspace, self._mask = 0, 0
        self._copies: Form | None = None

    def run(self, operands: Operands) -> bool:
        """Computes the parts.

        ``operands``: of the whole, in the memory formats of the schedule's problem.

        Returns:
            False, and nothing is computed, where the target or several parts must be copied, or where addresses need
            other plans.

        Raises:
            RuntimeError: as `Provider.launch`.
        """
        # The sum of parts of a half type is float32: see `launch`.
        if operands.w.dtype is not self._dtype:
            return False
        plans, place = self._plans, self._place
        if plans is None:
            plans = self._plans = self._made()
        if not plans:
            return False
        if not place.is_current():
            with place.current():
                return self.run(operands)
        read = operands if self._copies is None else self._copied(operands, self._copies)
        x, w, y = read.x.data_ptr(), read.w.data_ptr(), read.y.data_ptr()
        if (x | w | y) & self._mask:
            return False
        scratch = place.scratch(self._workspace) if self._workspace else None
        workspace = 0 if scratch is None else scratch.data_ptr()
        handle = place.handle()
        for execute, x_offset, y_offset in plans:
            execute(handle, x + x_offset, w, y + y_offset, workspace)
        if operands.bias is not None:
            target: torch.Tensor = getattr(operands, self._target)
            if self._length < target.shape[self._at]:
                target = target.narrow(self._at, self._start, self._length)
            target.add_(operands.bias.view(self._bias_shape))
        return True

    def _copied(self, operands: Operands, form: Form) -> Operands:
        """The only part's tensors, those in another memory format copied."""
        views = self._tiles[0].part(operands)
        for role in form.copied:
            setattr(views, role, getattr(views, role).contiguous(memory_format=form.memory_format))
        return views

    def _made(self) -> Sequence[Plan]:
        """The plans, which live as long as this launch; none where this class does not serve the parts."""
        made: list[Plan] = []
        kept: list[Prepared] = []
        accumulate = self._accumulate
        for tile in self._tiles:
            put = form(tile.problem)
            if put is None:
                return ()
            if put.copied:
                if len(self._tiles) > 1 or tile.problem.target in put.copied or tile.problem.dims == 1:
                    return ()
                self._copies = put
            prepared = self._provider.prepared(tile.problem, self._algorithm, accumulate)
            at = tile.at and tile.at + len(put.shapes[0]) - len(tile.problem.x_shape)  # one spatial dim becomes two
            x, _, y = (strides[at] * tile.problem.element_bytes for strides in put.strides)
            made.append((prepared.execute, *((0, 0) if put.copied else (tile.x[0] * x, tile.y[0] * y))))
            kept.append(prepared)
            self._workspace = max(self._workspace, prepared.workspace)
            self._mask |= prepared.alignment - 1
            accumulate = tile.problem.target is Role.W
        self._prepared = kept
        return made
