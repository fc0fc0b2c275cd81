"""Providers: where algorithms come from. One interface, one file for each provider."""

from functools import cache

import torch

from mucudnn.devices import Gpu, device_of
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.layout import Layout
from mucudnn.providers.onednn import OneDnn
from mucudnn.providers.provider import Provider
from mucudnn.providers.slices import Slices
from mucudnn.providers.stock import STOCK, Stock, is_torchs_own, stock_call, stock_kernel, stock_result

HOST_PROVIDERS: tuple[Provider, ...] = (
    Stock(),
    OneDnn(),
    Gemm(),
    Fft(),
    Slices(),
    Layout(),
)
"""The providers of convolutions on a CPU."""


@cache
def providers_on(device: torch.device, engines: str = "heuristic") -> tuple[Provider, ...]:
    """The providers of convolutions on a device.

    ``engines``: on a GPU, which of cuDNN's engines: "heuristic", those that it proposes, or "all".

    Raises:
        Unavailable: where cuDNN cannot be used.
        CudnnError: where cuDNN does not take the GPU.
    """
    found = device_of(device)
    if not isinstance(found, Gpu):
        return HOST_PROVIDERS
    from mucudnn.providers.cudnn.card import Card
    from mucudnn.providers.cudnn.engines import Engines
    from mucudnn.providers.cudnn.legacy import Legacy

    card = Card(found.index)
    return (Stock(), Engines(card, every=engines == "all"), Legacy(card))


__all__ = [
    "HOST_PROVIDERS",
    "STOCK",
    "Provider",
    "is_torchs_own",
    "providers_on",
    "stock_call",
    "stock_kernel",
    "stock_result",
]
