"""The card that cuDNN makes plans for, which may be absent from this machine."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass

from mucudnn.providers.cudnn.backend import Descriptor


@dataclass(frozen=True)
class PlannedCard:
    """Exactly one of the two is given."""

    handle: c_void_p | None = None  # A cuDNN handle on the card.
    properties: Descriptor | None = None  # A DEVICEPROP descriptor of a card that need not be here.
