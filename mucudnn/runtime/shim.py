"""The shim: mucudnn's kernels of `aten::convolution` and `aten::convolution_backward` in torch's dispatcher."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mucudnn.convolution.call import Call, format_name, torch_format
from mucudnn.convolution.problem import Direction
from mucudnn.devices import SERVED, Device, Host
from mucudnn.private_names import GPUS, UNPATCHED, reason_off, require_feature
from mucudnn.process.at_fork import renewed
from mucudnn.process.warning import warn
from mucudnn.providers import is_torchs_own, stock_kernel
from mucudnn.runtime.session import Session

_UNDECIDED: Any = object()
_BIAS_SUMS = {dims: (0, *range(2, dims)) for dims in range(2, 6)}
"""The dims of an output over which the gradient of a bias is summed, by their number."""
_lock = renewed(threading.Lock())
_library: torch.library.Library | None = None
_session: Session | None = None


def install(session: Session | None) -> Session | None:
    """Makes `session` serve this process's convolutions; None takes the shim out and leaves torch as it was.

    Returns:
        The session that served before.
    """
    global _library, _session
    if session is None and _library is not None:
        require_feature(UNPATCHED)
    with _lock:
        before, _session = _session, session
        if session is not None and _library is None:
            _library = _register()
        elif session is None and _library is not None:
            _library._destroy()
            _library = None
        return before


def _after_fork() -> None:
    """The board of a job's ranks is not for the processes that they fork: there torch computes all convolutions."""
    global _session
    if _session is not None and _session.has_board:
        _session = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current_session() -> Session | None:
    """The session that serves this process's convolutions."""
    return _session


def marks_local_work(device_type: str) -> bool:
    """Whether plans on such devices depend on which convolutions are local work: see `local_work`."""
    return _session is not None and _session.marks_local_work(device_type)


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key, device in SERVED.items():
        if device is not Host and (line := reason_off(GPUS)):
            warn(f"torch computes convolutions on GPUs: {line}")
            continue
        # Taken before the registration: afterwards these names mean the shim.
        forward = stock_kernel("convolution", key)
        backward = stock_kernel("convolution_backward", key)
        if device is Host and is_torchs_own("convolution", key):
            forward = _unboxed
        kernels = {
            "convolution": _convolution(forward, device),
            "convolution_backward": _convolution_backward(backward, device),
        }
        with warnings.catch_warnings():
            # Torch warns that its own kernel under CUDA's key is replaced, which is intended.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)
    return library


def _unboxed(*arguments: Any) -> torch.Tensor:
    """The result of torch's own kernel of `aten::convolution` on the host. Its arguments are not boxed here, as that
    would take longer."""
    flags: Any = False, False, False, False  # they concern cuDNN alone
    with torch._C.DisableTorchFunction():
        return torch._convolution(*arguments, *flags)


def _convolution(stock: Callable[..., Any], device: type[Device]) -> Any:
    """The kernel of `aten::convolution` above torch's own."""
    forward, switches, on_host = Direction.FORWARD, device.switches, device is Host

    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> torch.Tensor:
        session = _session
        if session is not None:
            geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
            devices = None if on_host else (input.get_device(), weight.get_device())
            looks = (
                devices, input.shape, input.stride(), input.dtype, weight.shape, weight.stride(), weight.dtype,
                geometry, switches(),
            )  # fmt: skip
            key = forward, looks
            decision = _decision(session, key, input)
            if decision is not None:
                call = Call(forward, input, weight, bias, None, *geometry)
                if decision is _UNDECIDED:
                    decision = session.decide(key, call)
                result = None if decision is None else decision.run(call)
                if result is not None:
                    return result
        by_torch: torch.Tensor = stock(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        return by_torch

    return convolution


def _convolution_backward(stock: Callable[..., Any], device: type[Device]) -> Any:
    """The kernel of `aten::convolution_backward` above torch's own."""
    backward_data, backward_filter, switches = Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER, device.switches
    on_host = device is Host

    def convolution_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        output_mask: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        session = _session
        if session is not None:
            geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
            devices = None if on_host else (grad_output.get_device(), input.get_device(), weight.get_device())
            looks = (
                devices, grad_output.shape, grad_output.stride(), grad_output.dtype, input.shape, input.stride(),
                input.dtype, weight.shape, weight.stride(), weight.dtype, geometry, switches(),
            )  # fmt: skip
            wants_data, wants_filter, _ = output_mask
            data = _decision(session, (backward_data, looks), input) if wants_data else None
            filter = _decision(session, (backward_filter, looks), input) if wants_filter else None
            if data is not None or filter is not None:
                if not (on_host or grad_output.is_contiguous()):
                    grad_output = _laid_out(grad_output, input)
                arguments = grad_output, input, weight, bias_sizes, *geometry
                gradients = _Gradients(stock, arguments, output_mask)
                return gradients.served(session, data, filter, looks)
        every: Sequence[torch.Tensor | None] = stock(
            grad_output, input, weight, bias_sizes, stride, padding, dilation,
            transposed, output_padding, groups, output_mask,
        )  # fmt: skip
        return every

    return convolution_backward


def _laid_out(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A gradient in a memory format. As in torch's own kernel for a GPU, one copy serves both directions."""
    if format_name(grad_output) != "strided":
        return grad_output
    return grad_output.contiguous(memory_format=torch_format(format_name(input), input.dim()))


def _decision(session: Session, key: tuple[Any, ...], input: torch.Tensor) -> Any:
    """The decision for a key, `_UNDECIDED` if it is to be made now; `None` where torch computes the call."""
    decision = session.decisions.get(key, _UNDECIDED)
    if decision is _UNDECIDED:
        return None if session.awaits(key, input.device) else decision
    if decision is not None and decision.rest > 0:
        decision.rest -= 1
        return None
    return decision


class _Gradients:
    """The gradients of one call of `aten::convolution_backward`: some by decisions, the others by torch at once."""

    __slots__ = ("_arguments", "_found", "_left", "_stock")

    def __init__(self, stock: Callable[..., Any], arguments: tuple[Any, ...], mask: Sequence[bool]) -> None:
        """
        Args:
            stock: torch's own kernel, and its arguments but for the mask.
            mask: which gradients are asked for.
        """
        self._stock, self._arguments = stock, arguments
        self._left = list(mask)
        self._found: list[torch.Tensor | None] = [None, None, None]

    def served(self, session: Session, data: Any, filter: Any, looks: tuple[Any, ...]) -> Sequence[torch.Tensor | None]:
        """The gradients of input, weight and bias that are asked for.

        Args:
            data, filter: the decisions on the gradients of input and weight: `_UNDECIDED` for what is to be decided
                now, `None` for what torch computes.
            looks: what the session knows the directions by.
        """
        found, left = self._found, self._left
        grad_output, input, weight, _, *geometry = self._arguments
        arguments = input, weight, None, grad_output, *geometry
        if data is not None:
            call = Call(Direction.BACKWARD_DATA, *arguments)
            if data is _UNDECIDED:
                data = session.decide((call.direction, looks), call)
            found[0] = None if data is None else data.run(call)
            left[0] = found[0] is None
        if filter is not None:
            before = self._input_gradient if left[0] else None
            call = Call(Direction.BACKWARD_FILTER, *(*arguments, before, self._weight_gradient))
            if filter is _UNDECIDED:
                filter = session.decide((call.direction, looks), call)
            found[1] = None if filter is None else filter.run(call)
            left[1] = found[1] is None
        if left[2] and not left[1] and (found[0] is not None or found[1] is not None):
            # Torch would compute the weight's gradient once more to get that of the bias, which is a mere sum.
            found[2], left[2] = grad_output.sum(_BIAS_SUMS[grad_output.dim()]), False
        if True in left:
            rest = self._by_torch(left)
            found[:] = [new if is_left else known for new, is_left, known in zip(rest, left, found, strict=True)]
        return tuple(found)

    def _by_torch(self, mask: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        every: Sequence[torch.Tensor | None] = self._stock(*self._arguments, mask)
        return every

    def _input_gradient(self) -> None:
        # Torch computes it before the weight's gradient, which is not alive yet then. The other way round the peak of
        # memory would be higher than in the step that was recorded.
        self._found[0], self._left[0] = self._by_torch([True, False, False])[0], False

    def _weight_gradient(self) -> torch.Tensor:
        # With that of the bias, as ever: without it oneDNN would have to make another kernel ready.
        _, weight, bias = self._by_torch([False, True, self._left[2]])
        if self._left[2]:
            self._found[2], self._left[2] = bias, False
        assert weight is not None, "it was asked for"
        return weight
