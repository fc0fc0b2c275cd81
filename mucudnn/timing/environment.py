"""Environment: whatever affects the time of a convolution besides the problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from mucudnn.devices import device_of
from mucudnn.version import VERSION


@dataclass(frozen=True)
class Environment:
    """The machine, the libraries and the switches under which a launch is timed.

    Attributes:
        device: the device's type and name.
        threads: intra-operator threads of the host; 0 where they have no part in it.
        deterministic: whether only deterministic algorithms may run.
        precision: the switches that let a backend compute in a narrower type, as text.
        libraries: versions of what runs the launches, as text.
    """

    device: str
    threads: int
    deterministic: bool
    precision: str
    libraries: str

    @classmethod
    def current(cls, device: torch.device) -> Environment:
        """The environment of a call on `device` now."""
        found = device_of(device)
        libraries = [f"mucudnn {VERSION}", f"torch {torch.__version__}", found.libraries]
        return cls(
            device=found.name,
            threads=found.threads,
            deterministic=found.is_deterministic,
            precision=found.precision,
            libraries=", ".join(filter(None, libraries)),
        )

    def launch_key(self) -> dict[str, Any]:
        """Plain values for a database."""
        return asdict(self)
