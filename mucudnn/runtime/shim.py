"""The shim: kernels of mucudnn's own beneath `aten::convolution` and `aten::convolution_backward`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Direction
from mucudnn.devices import SERVED, Device, Host
from mucudnn.providers import stock_kernel
from mucudnn.runtime.session import Session

_UNMET: Any = object()
_lock = threading.Lock()
_library: torch.library.Library | None = None
_session: Session | None = None


def install(session: Session | None) -> Session | None:
    """Makes `session` serve this process's convolutions; None takes the shim out and leaves torch as it was.

    Returns:
        The session that served before.
    """
    global _library, _session
    with _lock:
        before, _session = _session, session
        if session is not None and _library is None:
            _library = _register()
        elif session is None and _library is not None:
            _library._destroy()
            _library = None
        return before


def current() -> Session | None:
    """The session that serves this process's convolutions."""
    return _session


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key, device in SERVED.items():
        # Taken before the registration: afterwards these names mean the shim.
        forward = stock_kernel("convolution", key)
        backward = stock_kernel("convolution_backward", key)
        kernels = {
            "convolution": _convolution(forward, device),
            "convolution_backward": _convolution_backward(backward, device),
        }
        with warnings.catch_warnings():
            # Torch warns that its own kernel under CUDA's key is replaced, which is intended.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return library


def _convolution(stock: Any, device: type[Device]) -> Any:
    """The kernel of `aten::convolution` above torch's own."""
    forward, on_host, switches = Direction.FORWARD, device is Host, device.switches

    def convolution(
        keyset: Any,
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
            key = (forward, _look(input), _look(weight), geometry, switches())
            decision = session.decisions.get(key, _UNMET)
            if decision is not None and not (decision is _UNMET and session.awaits(key, input.device)):
                call = Call(forward, input, weight, bias, None, *geometry)
                if decision is _UNMET:
                    decision = session.decide(key, call)
                result = None if decision is None else decision.run(call)
                if result is not None:
                    return result
        if on_host:
            # Torch's own kernel does the same. Called like this, its arguments are not boxed, which takes longer. The
            # flags concern cuDNN alone.
            with torch._C.DisableTorchFunction():
                return torch._convolution(
                    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
                    False, False, False, False,
                )  # fmt: skip
        by_torch: torch.Tensor = stock.call_boxed(
            keyset, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        return by_torch

    return convolution


def _convolution_backward(stock: Any, device: type[Device]) -> Any:
    """The kernel of `aten::convolution_backward` above torch's own."""
    directions, switches = (Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER), device.switches

    def convolution_backward(
        keyset: Any,
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
    ) -> tuple[torch.Tensor | None, ...]:
        def by_torch(mask: Sequence[bool]) -> Sequence[torch.Tensor | None]:
            found: Sequence[torch.Tensor | None] = stock.call_boxed(
                keyset, grad_output, input, weight, bias_sizes, stride, padding, dilation,
                transposed, output_padding, groups, mask,
            )  # fmt: skip
            return found

        def input_gradient() -> None:
            # Torch computes it before the weight's gradient, which is not alive yet then. The other way round the peak
            # of memory would be higher than in the step that was recorded.
            gradients[0], left[0] = by_torch([True, False, False])[0], False

        def weight_gradient() -> torch.Tensor:
            # With that of the bias, as ever: without it oneDNN would have to make another kernel ready.
            _, found, bias = by_torch([False, True, left[2]])
            if left[2]:
                gradients[2], left[2] = bias, False
            assert found is not None, "it was asked for"
            return found

        session = _session
        left = list(output_mask)
        gradients: list[torch.Tensor | None] = [None, None, None]
        if session is not None:
            geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
            looks = (_look(grad_output), _look(input), _look(weight), geometry, switches())
            for place, direction in enumerate(directions):
                if not left[place]:
                    continue
                decision = session.decisions.get((direction, *looks), _UNMET)
                if decision is None or (decision is _UNMET and session.awaits((direction, *looks), input.device)):
                    continue
                before = input_gradient if place == 1 and left[0] else None
                stock_gradient = weight_gradient if place == 1 else None
                call = Call(direction, input, weight, None, grad_output, *geometry, before, stock_gradient)
                if decision is _UNMET:
                    decision = session.decide((direction, *looks), call)
                gradients[place] = None if decision is None else decision.run(call)
                left[place] = gradients[place] is None
            if left[2] and not left[1] and left != list(output_mask):
                # Torch would compute the weight's gradient once more to get that of the bias, which is a mere sum.
                gradients[2] = grad_output.sum((0, *range(2, grad_output.dim())))
                left[2] = False
        if any(left):
            rest = by_torch(left)
            for place, wanted in enumerate(left):
                if wanted:
                    gradients[place] = rest[place]
        return tuple(gradients)

    return convolution_backward


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that decide how it is convolved."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
