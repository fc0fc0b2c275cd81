"""The local convolution of one rank: with its whole block of the weight, or with some channels or filters only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distconv.rules.convolution import kernels
from distconv.rules.convolution.columns import channels_at_once
from distconv.rules.convolution.plan import BackwardCall, ConvolutionPlan
from distconv.rules.convolution.swapped import restored, swapped, swapping_pays
from distconv.settings.channels import GroupRun
from distconv.transfer.route import part
from mucudnn.convolution.geometry import Interval, length
from mucudnn.providers.stock import BLOCK

ONE_CALL = 2**19
"""Products of a sample, at least, for which dL/dx and dL/dweight are worth a call each."""


@dataclass(frozen=True)
class LocalConvolution:
    """The convolution of a rank with its block of the weight. Intervals of channels and filters count from the block's.

    Only a layer without groups can be computed in parts.
    """

    plan: ConvolutionPlan
    weight: Tensor  # The weight of the block.

    def forward(self, x: Tensor, bias: Tensor | None, channels: Interval, filters: Interval) -> Tensor:
        """These filters of y, from these channels, ``x``, alone; ``bias`` has a number for each filter of the block."""
        plan, block = self.plan, self.plan.split.block
        shape = [*plan.out_local]
        shape[1] = filters[1] - filters[0]
        if 0 in shape or not block.runs:
            return x.new_zeros(shape)
        is_whole = (channels, filters) == block.every
        weight, runs = (self.weight, block.runs) if is_whole else self._part(channels, filters)
        bias = None if bias is None else part(bias, 0, filters)
        if len(runs) == 1:
            arguments = (*plan.arguments, runs[0].groups)
            y = kernels.local_convolution(plan.onednn, part(x, 1, runs[0].channels), weight, bias, arguments)
        else:
            made = [
                kernels.local_convolution(
                    plan.onednn,
                    part(x, 1, run.channels),
                    part(weight, 0, run.weight),
                    None if bias is None else part(bias, 0, run.filters),
                    (*plan.arguments, run.groups),
                )
                for run in runs
            ]
            y = torch.cat(made, 1)
        for side in plan.sides:
            y = part(y, side.dim, (side.skip, side.skip + side.own))
        return y

    def backward(
        self, grad: Tensor, x: Tensor, channels: Interval, filters: Interval, for_data: bool, for_filter: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The shares of these filters' ``grad`` in dL/dx of these channels, and in dL/dweight, each if asked for."""
        weight, runs = self._part(channels, filters)
        if not x.numel() or not grad.numel() or not runs:
            return x.new_zeros(x.shape) if for_data else None, weight.new_zeros(weight.shape) if for_filter else None
        data, filter = self.plan.backward_calls
        if for_data and for_filter and grad.numel() * weight.numel() < ONE_CALL * grad.shape[1]:
            filter = data  # whose larger padding takes less time than a second call
        dxs: list[Tensor] = []
        dws: list[Tensor] = []
        for run in runs:
            operands = part(grad, 1, run.filters), part(x, 1, run.channels), part(weight, 0, run.weight)
            if data is filter:
                dx, dw = self._gradients(*operands, run, data, for_data, for_filter)
            else:
                dx = dw = None
                if for_filter:
                    _, dw = self._gradients(*operands, run, filter, False, True)
                if for_data:
                    dx, _ = self._gradients(*operands, run, data, True, False)
            dxs += [] if dx is None else [dx]
            dws += [] if dw is None else [dw]
        return _joined(dxs, 1), _joined(dws, 0)

    def _part(self, channels: Interval, filters: Interval) -> tuple[Tensor, Sequence[GroupRun]]:
        """The weight that takes these channels to these filters, and the local calls with it."""
        layer = self.plan.layer
        block = self.plan.split.block
        if (channels, filters) == block.every:
            return self.weight, block.runs
        weight = part(part(self.weight, layer.channel_dim, channels), layer.filter_dim, filters)
        return weight, (GroupRun((0, length(channels)), (0, length(filters)), (0, weight.shape[0]), layer.groups),)

    def _gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        run: GroupRun,
        call: BackwardCall,
        for_data: bool,
        for_filter: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        plan = self.plan
        rest = plan.stride, call.padding, plan.dilation, plan.layer.transposed, plan.output_padding, run.groups
        if call.zeros and not for_data and self._swaps(x, weight, run, call):
            grad, padding = swapped(grad, weight.shape, call.padding, call.zeros, plan.dilation)
            of = weight.reshape(weight.shape[1], weight.shape[0], *weight.shape[2:])  # Its numbers do not matter.
            _, dw = self._gradients(x, grad, of, run, BackwardCall(padding, [], ()), False, True)
            assert dw is not None
            return None, restored(dw)
        at_once = channels_at_once(grad, x, weight, rest)
        if call.zeros and not for_data:
            at_once = min(at_once, self._padded_at_once(x, run))
        dxs: list[Tensor] = []
        dws: list[Tensor] = []
        for start in range(0, x.shape[1], at_once):
            some = start, min(start + at_once, x.shape[1])
            of_x, of = (x, weight) if at_once == x.shape[1] else (part(x, 1, some), part(weight, 1, some))
            if call.zeros:
                of_x = torch.ops.aten.constant_pad_nd.default(of_x, call.zeros)
            dx, dw = kernels.local_gradients(plan.onednn, grad, of_x, of, rest, for_data, for_filter)
            if dx is not None:
                for dim, first in call.own if call.zeros else ():
                    dx = dx.narrow(dim, first, x.shape[dim])
                dxs.append(dx)
            dws += [] if dw is None else [dw]
        return _joined(dxs, 1), _joined(dws, 0 if plan.layer.transposed else 1)

    def _swaps(self, x: Tensor, weight: Tensor, run: GroupRun, call: BackwardCall) -> bool:
        """Whether dL/dweight is computed with x and dL/dy in each other's place: see `swapped`."""
        plan = self.plan
        is_simple = set(plan.stride) == {1} and run.groups == 1 and not plan.layer.transposed
        return is_simple and swapping_pays(x.shape, weight.shape, call.zeros, not plan.onednn)

    def _padded_at_once(self, x: Tensor, run: GroupRun) -> int:
        """The number of channels of x that are padded at a time for dL/dweight.

        All of them, unless there are more than filters: then the copies need not be larger than dL/dy. oneDNN takes no
        longer for the parts, if they are of whole blocks of its own.
        """
        filters = length(run.filters)
        parts = self.plan.onednn and run.groups == 1 and filters % BLOCK == 0
        return min(filters, x.shape[1]) if parts else x.shape[1]


def _joined(parts: list[Tensor], dim: int) -> Tensor | None:
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, dim)
