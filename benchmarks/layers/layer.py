"""The distinct convolutions of a network, each with its shapes, geometry and number of calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.networks import Network

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A convolution as a network calls it.

    name: of the first module with this shape.
    input, weight: whole shapes, (N, C, *spatial) and torch's weight layout.
    count: how often the network calls it in one forward pass.
    """

    name: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    count: int = 1


def convolutions(network: Network, batch: int) -> list[Layer]:
    """The distinct convolutions of a network at a batch size, in the order of the first call of each.

    The model runs on the meta device: nothing is allocated or computed.

    Raises ValueError for a module whose padding is not zeros of equal width on both sides, which Layer cannot say.
    """
    calls: list[Layer] = []

    def record(name: str, module: nn.Module, inputs: Tensor) -> None:
        assert isinstance(module, _CONVOLUTIONS)
        padding = module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            raise ValueError(f"convolution {name} of {network.name}: padding {padding!r}, {module.padding_mode!r}")
        calls.append(
            Layer(
                name=name,
                input=tuple(inputs.shape),
                weight=tuple(module.weight.shape),
                stride=tuple(module.stride),
                padding=tuple(padding),
                dilation=tuple(module.dilation),
                groups=module.groups,
                transposed=module.transposed,
                output_padding=tuple(module.output_padding),
            )
        )

    with torch.device("meta"), torch.no_grad():
        model = network.build()
        for name, module in model.named_modules():
            if isinstance(module, _CONVOLUTIONS):
                module.register_forward_pre_hook(lambda module, inputs, name=name: record(name, module, inputs[0]))
        model(torch.empty(batch, *network.input_shape, dtype=network.dtype))

    counts = Counter(replace(call, name="") for call in calls)
    first = {replace(call, name=""): call.name for call in reversed(calls)}
    return [replace(shape, name=first[shape], count=count) for shape, count in counts.items()]
