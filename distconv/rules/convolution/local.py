"""The local convolution of one rank: with its whole block of the weight, or with some channels or filters only.

For gradients of filters that reach far beyond an image, as those of large dilations do, oneDNN writes out the operands
of all products for each channel (columns). The gradients of some channels need the columns of these alone: that takes
no longer, as they stay in the processor's caches, and a small part of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distconv.rules.convolution import kernels
from distconv.rules.convolution.plan import BackwardCall, ConvolutionPlan
from distconv.rules.convolution.strips import problem_of
from distconv.settings.channels import GroupRun
from distconv.transfer.route import part
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval, length
from mucudnn.convolution.problem import Direction, Shape
from mucudnn.providers.onednn_copies import writes_columns
from mucudnn.providers.stock import BLOCK, evened

ONE_CALL = 2**19
"""Products of a sample, at least, for which dL/dx and dL/dweight are worth a call each."""

AT_ONCE = 8 << 20
"""Bytes of columns of one sample that are written out at once, unless those of `FEWEST` channels are more."""

FEWEST = 4 * BLOCK  # Channels: products of fewer would be slower.

MOSTLY = 1.5
"""Positions with zeros, relative to those without, beyond which dL/dweight swaps x and dL/dy."""


@dataclass(slots=True, eq=False)  # one is made for every call, and a frozen one takes three times as long to make
class LocalConvolution:
    """The convolution of a rank with its block of the weight. Intervals of channels and filters count from the block's.

    Only a layer without groups can be computed in parts.
    """

    plan: ConvolutionPlan
    weight: Tensor  # The weight of the block.

    def forward(self, x: Tensor, bias: Tensor | None, channels: Interval, filters: Interval) -> Tensor:
        """These filters of y, from these channels, ``x``, alone; ``bias`` has a number for each filter of the block."""
        plan = self.plan
        if plan.only_call is None or (channels, filters) != plan.split.block.every:
            y = self._forward_in_parts(x, bias, channels, filters)
        elif plan.by_torch:
            with torch._C._AutoDispatchBelowAutograd():  # as `kernels.local_convolution` does
                y = torch.convolution(x, self.weight, bias, *plan.only_call)
        else:
            y = kernels.local_convolution(plan.onednn, x, self.weight, bias, plan.only_call)
        for side in plan.sides:
            y = part(y, side.dim, (side.skip, side.skip + side.own))
        return y

    def _forward_in_parts(self, x: Tensor, bias: Tensor | None, channels: Interval, filters: Interval) -> Tensor:
        """The same by a local call for each run of groups, with what lies around the rank's own outputs."""
        plan = self.plan
        shape = [*plan.out_local]
        shape[1] = length(filters)
        if 0 in shape or not plan.split.block.runs:
            return x.new_zeros(shape)
        weight, runs = self._part(channels, filters)
        bias = None if bias is None else part(bias, 0, filters)
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
        return made[0] if len(made) == 1 else torch.cat(made, 1)

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
        if data is filter and len(runs) == 1:
            run = runs[0]
            operands = part(grad, 1, run.filters), part(x, 1, run.channels), part(weight, 0, run.weight)
            return self._gradients(*operands, run, data, for_data, for_filter)
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
        if call.zeros and not for_data and self._swapping_pays(x, weight, run, call):
            return None, self._swapped_gradient(grad, x, weight, run, call)
        at_once = _channels_at_once(grad, _with_zeros(x, call), weight, rest, for_data, for_filter)
        if call.zeros and not for_data:
            at_once = min(at_once, self._padded_at_once(x, run))
        elif not call.zeros and at_once == x.shape[1]:
            return kernels.local_gradients(plan.onednn, grad, x, weight, rest, for_data, for_filter)
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

    def _swapping_pays(self, x: Tensor, weight: Tensor, run: GroupRun, call: BackwardCall) -> bool:
        """Whether x would be padded with about as many zeros as it has elements.

        Where the kernel writes out columns, they are then to be no more than without.
        """
        plan = self.plan
        if set(plan.stride) != {1} or run.groups > 1 or plan.layer.transposed:
            return False
        filters, channels = weight.shape[:2]
        own, all_ = math.prod(x.shape[2:]), math.prod(_with_zeros(x, call)[2:])
        return all_ > MOSTLY * own and (plan.onednn or filters * own <= channels * all_)

    def _swapped_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, run: GroupRun, call: BackwardCall) -> Tensor:
        """dL/dweight with x and dL/dy in each other's place, for few rows of x beside a filter of large reach.

        dL/dweight of filter f, channel c and element k is the sum over positions i of x[c, i] dL/dy[f, i - k]. Torch
        takes it over the positions of dL/dy, of which a rank with 10 rows and a reach of 73 has 82: x is padded with
        rows of zeros to as many. Seen as a convolution of dL/dy whose result is x, it is a sum over 10 rows.
        """
        reaches = [d * (k - 1) for d, k in zip(self.plan.dilation, weight.shape[2:], strict=True)]
        sides = zip(reaches, call.padding, call.zeros[-2::-2], call.zeros[-1::-2], strict=True)
        ends = [(reach - p - before, reach - p - after) for reach, p, before, after in sides]
        padding = [max(0, min(each)) for each in ends]
        rest = [end - p for each, p in zip(ends[::-1], padding[::-1], strict=True) for end in each]
        grad = torch.ops.aten.constant_pad_nd.default(grad, rest) if any(rest) else grad.contiguous()
        of = weight.reshape(weight.shape[1], weight.shape[0], *weight.shape[2:])  # Its numbers do not matter.
        _, dw = self._gradients(x, grad, of, run, BackwardCall(padding, [], ()), False, True)
        assert dw is not None
        return dw.transpose(0, 1).flip([*range(2, dw.dim())]).contiguous()

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


def _with_zeros(x: Tensor, call: BackwardCall) -> Shape:
    """The shape of x with the zeros beside it."""
    if not call.zeros:
        return tuple(x.shape)
    ends = zip(x.shape[2:], call.zeros[-2::-2], call.zeros[-1::-2], strict=True)
    return (*x.shape[:2], *(n + before + after for n, before, after in ends))


def _channels_at_once(grad: Tensor, shape: Shape, w: Tensor, arguments: Any, for_data: bool, for_filter: bool) -> int:
    """The channels of x whose gradients, and those of their weights, are to be computed at a time: all, or fewer.

    ``shape``: that of x with the zeros beside it. ``arguments``: those of `aten::convolution`. Transposed convolutions
    and groups are left whole.
    """
    channels, transposed, groups = shape[1], arguments[3], arguments[5]
    if channels <= FEWEST or transposed or groups > 1 or grad.dtype is not torch.float32:
        return channels
    columns = math.prod(w.shape[1:]) * math.prod(grad.shape[2:]) * grad.element_size()
    if columns <= AT_ONCE:
        return channels
    key = (*map(tuple, arguments[:3]), False, (), 1)
    asked = (Direction.BACKWARD_DATA,) * for_data + (Direction.BACKWARD_FILTER,) * for_filter
    if not any(_writes_columns(each, shape, tuple(w.shape), key, torch.get_num_threads()) for each in asked):
        return channels
    return min(channels, max(FEWEST, channels * AT_ONCE // columns // BLOCK * BLOCK))


@planned(4096)
def _writes_columns(direction: Direction, x: Shape, w: Shape, arguments: Any, _: int) -> bool:
    """By the number of threads, too, on which torch's choice of a kernel may depend."""
    problem = problem_of(direction, x, w, arguments)
    return problem is not None and writes_columns(evened(problem).problem)
