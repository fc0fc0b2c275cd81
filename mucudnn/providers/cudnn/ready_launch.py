"""Launches whose plans are looked up once for all calls: cuDNN computes the parts in the operands' own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import Role
from mucudnn.convolution.tile import Tile
from mucudnn.providers.cudnn.form import Form, form
from mucudnn.providers.cudnn.launch import PlanPlace, Prepared, Preparing

Plan = tuple[Callable[[c_void_p, int, int, int, int], None], int, int]
"""A part's plan as a function to call, and the offsets of its x and y in bytes."""


class ReadyLaunch:
    """One algorithm on consecutive parts.

    A call is on the way of every convolution of the program: it computes three addresses and executes the plans. Its
    code is flat, because a program's next convolution finds it outside the processor's caches.
    """

    def __init__(
        self, place: PlanPlace, provider: Preparing, algorithm: str, tiles: Sequence[Tile], accumulate: bool
    ) -> None:
        """``accumulate``: as `Provider.launch` takes it."""
        self._place, self._provider, self._algorithm = place, provider, algorithm
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
        views = self._tiles[0].part(operands).operands
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
