"""Computes parts of a convolution by cuDNN, in the memory format and with the alignment that the plan expects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from ctypes import c_void_p
from dataclasses import replace
from typing import Protocol

import torch

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.cudnn.device import PlannedCard
from mucudnn.providers.cudnn.form import Form
from mucudnn.providers.cudnn.library import Library


class PlanPlace(Protocol):
    """The device on which plans run: a `Card`, or a substitute in tests."""

    library: Library

    def planning(self) -> AbstractContextManager[PlannedCard]:
        """The device that plans are made for, current and with a handle that no other thread uses meanwhile."""
        ...

    def handle(self) -> c_void_p: ...

    def scratch(self, size: int) -> torch.Tensor: ...

    def is_current(self) -> bool: ...

    def current(self) -> AbstractContextManager[object]: ...


class Prepared(Protocol):
    """A convolution by one algorithm, ready to run on any addresses.

    Attributes:
        workspace: bytes that the algorithm itself needs.
        alignment: bytes that all addresses must be multiples of.
    """

    @property
    def form(self) -> Form: ...

    @property
    def workspace(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    def execute(self, handle: c_void_p, x: int, w: int, y: int, workspace: int) -> None: ...


class Preparing(Protocol):
    """The method of a provider that `launch` calls."""

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> Prepared:
        """``accumulate``: whether to add to the target rather than overwrite it."""
        ...


def launch(place: PlanPlace, provider: Preparing, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
    """Runs one algorithm on consecutive parts; the arguments are those of `Provider.launch`."""
    first, whole = parts[0].problem, parts[0].whole
    is_sum = first.target is Role.W
    # A target that is copied is computed by itself and then added; so are parts of a half type in a float32 sum, as no
    # engine of cuDNN 9.19 or 9.28 adds products of half types to float32 in memory.
    is_apart = first.formats[_ROLES.index(first.target)] == "strided" or (
        is_sum and first.is_half and whole.w.dtype is torch.float32
    )
    adds_first, size = accumulate, 0
    runs: list[tuple[Part, Prepared]] = []
    for part in parts:
        beta = accumulate and not is_apart
        key = provider, algorithm, beta
        prepared: Prepared | None = part.kept.get(key)
        if prepared is None:
            prepared = part.kept[key] = provider.prepared(part.problem, algorithm, beta)
        union = _union(part, prepared.form, is_apart)
        if union & (prepared.alignment - 1):
            prepared = _misaligned(provider, prepared, part, algorithm, beta, union & -union)
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
            if whole.bias is not None:
                part.target.add_(whole.bias.view(-1, *(1,) * first.dims))


_ROLES = tuple(Role)


def _union(part: Part, form: Form, is_apart: bool) -> int:
    """The addresses of all tensors that are not copied, or-ed: the lowest bit is their alignment."""
    union = 0
    for role in Role:
        if role not in form.copied and not (is_apart and role is part.problem.target):
            union |= getattr(part.operands, role).data_ptr()
    return union


def _misaligned(
    provider: Preparing, expected: Prepared, part: Part, algorithm: str, accumulate: bool, alignment: int
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
        given: torch.Tensor = getattr(part.operands, role)
        if role in form.copied or given.dtype is not dtype:
            source = _shaped(given, problem.dims)
            given = torch.empty(shape, dtype=dtype, device=given.device, memory_format=form.memory_format)
            if role is not problem.target:
                given.copy_(source)
        tensors[role] = given
    x, w, y = (tensors[role].data_ptr() for role in Role)
    prepared.execute(handle, x, w, y, workspace)
    target = part.target
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
