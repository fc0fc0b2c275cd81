"""Ready launch: parts that cuDNN computes where they lie, by plans that are looked up once for all calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import Role
from mucudnn.convolution.tile import Tile
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.launch import Place, Prepared, Preparing

Plans = Sequence[tuple[Prepared, int, int]]
"""Of each part: its plan, and the bytes before its x and y."""


class ReadyLaunch:
    """One algorithm on consecutive parts.

    A call is on the way of every convolution of the program: it computes three addresses and executes the plans.
    """

    def __init__(
        self, place: Place, provider: Preparing, algorithm: str, tiles: Sequence[Tile], accumulate: bool
    ) -> None:
        """
        Args:
            accumulate: as `Provider.launch` takes it.
        """
        self._place, self._provider, self._algorithm = place, provider, algorithm
        self._tiles, self._accumulate = tiles, accumulate
        self._dtype: torch.dtype = getattr(torch, tiles[0].problem.dtype)
        self._bias_shape = -1, *(1,) * tiles[0].problem.dims
        self._plans: Plans | None = None
        self._workspace, self._mask = 0, 0

    def run(self, operands: Operands) -> bool:
        """Computes the parts.

        Args:
            operands: of the whole, in the memory formats of the schedule's problem.

        Returns:
            False, and nothing is computed, where operands must be copied, or are at addresses that need other plans.

        Raises:
            RuntimeError: as `Provider.launch`.
        """
        # The sum of parts of a half type is float32: see `launch`.
        if operands.w.dtype is not self._dtype:
            return False
        plans = self._plans
        if plans is None:
            plans = self._plans = self._made()
        x, w, y = operands.x.data_ptr(), operands.w.data_ptr(), operands.y.data_ptr()
        if not plans or (x | w | y) & self._mask:
            return False
        if self._place.is_current():
            self._execute(plans, x, w, y)
        else:
            with self._place.current():
                self._execute(plans, x, w, y)
        if operands.bias is not None:
            self._add(operands, operands.bias)
        return True

    def _execute(self, plans: Plans, x: int, w: int, y: int) -> None:
        scratch = self._place.scratch(self._workspace) if self._workspace else None
        workspace = 0 if scratch is None else scratch.data_ptr()
        handle = self._place.handle()
        for prepared, x_offset, y_offset in plans:
            prepared.execute(handle, x + x_offset, w, y + y_offset, workspace)

    def _add(self, operands: Operands, bias: torch.Tensor) -> None:
        first = self._tiles[0]
        problem = first.problem
        target = operands.target(problem)
        start, length = (first.x if problem.target is Role.X else first.y)[0], sum(tile.extent for tile in self._tiles)
        if length < target.shape[first.at]:
            target = target.narrow(first.at, start, length)
        with torch._C._AutoDispatchBelowAutograd():
            target.add_(bias.view(self._bias_shape))

    def _made(self) -> Plans:
        """The plans, held as long as this launch; none where anything must be copied."""
        made, accumulate = [], self._accumulate
        for tile in self._tiles:
            put = form(tile.problem)
            if put is None or put.copied:
                return ()
            prepared = self._provider.prepared(tile.problem, self._algorithm, accumulate)
            at = tile.at and tile.at + len(put.shapes[0]) - len(tile.problem.x_shape)  # one spatial dim becomes two
            x, _, y = (strides[at] * tile.problem.element_bytes for strides in put.strides)
            made.append((prepared, tile.x[0] * x, tile.y[0] * y))
            self._workspace = max(self._workspace, prepared.workspace)
            self._mask |= prepared.alignment - 1
            accumulate = tile.problem.target is Role.W
        return made
