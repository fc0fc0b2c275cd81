"""One interface for the kinds of device that convolutions run on, and one file for each kind."""

from functools import cache

import torch

from mucudnn.devices.device import Clock, Device, Stopwatch, Work
from mucudnn.devices.gpu import Gpu
from mucudnn.devices.host import Host

KINDS: dict[str, type[Device]] = {"cpu": Host, "cuda": Gpu}  # The classes by torch's name of the device's type.

SERVED: dict[str, type[Device]] = {"CPU": Host} | ({"CUDA": Gpu} if torch.version.cuda is not None else {})
"""The kinds whose convolutions the shim takes, by the dispatch key that torch registers their kernels under."""


@cache
def device_of(place: torch.device) -> Device:
    """The device that tensors at a place are on. Raises KeyError for a kind of device that is not known here."""
    return KINDS[place.type](place)


__all__ = ["KINDS", "SERVED", "Clock", "Device", "Gpu", "Host", "Stopwatch", "Work", "device_of"]
