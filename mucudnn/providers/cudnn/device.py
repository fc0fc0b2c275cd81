"""Device: the card that plans are made for, which may be absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, Self

from mucudnn.providers.cudnn.backend import Descriptor, Kind, Name, Type
from mucudnn.providers.cudnn.library import Library


@dataclass(frozen=True)
class Device:
    """Exactly one of the two is given.

    Attributes:
        handle: a cuDNN handle on the card.
        properties: a DEVICEPROP descriptor of a card that need not be here.
    """

    handle: c_void_p | None = None
    properties: Descriptor | None = None

    @classmethod
    def known(cls, library: Library, properties: Mapping[str, Any]) -> Self:
        """A card by its properties, cuDNN's own names for those of cudaDeviceProp."""
        descriptor = Descriptor(library, Kind.DEVICEPROP)
        descriptor.set_text(Name.DEVICEPROP_JSON_REPRESENTATION, json.dumps(properties).encode())
        return cls(properties=descriptor.finalize())

    @classmethod
    def described(cls, library: Library, handle: c_void_p) -> dict[str, Any]:
        """The properties of a handle's card, as `known` takes them.

        Raises:
            CudnnError: where cuDNN does not tell them.
        """
        descriptor = Descriptor(library, Kind.DEVICEPROP).set(Name.DEVICEPROP_HANDLE, Type.HANDLE, handle.value)
        found: dict[str, Any] = json.loads(descriptor.finalize().text(Name.DEVICEPROP_JSON_REPRESENTATION))
        return found


H200: dict[str, Any] = {
    "cudaDeviceId": 0,
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "isTccDriver": 0,
    "l2CacheSize": 62914560,
    "maxBlockSize": [1024, 1024, 64],
    "maxCtasPerSM": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "multiProcessorCount": 132,
    "oversizedSharedMemoryPerBlock": 0,
    "pciDeviceId": 0x2335,
    "regsPerBlock": 65536,
    "reservedSharedMemoryPerBlock": 1024,
    "smClockRateKHz": 1980000,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150754820096,
    "warpSize": 32,
}
"""An H200's properties from its data sheet and from what CUDA reports of it; not read from a card through cuDNN."""
