"""distconv: runs an unmodified training script on many ranks, with samples, channels and space partitioned among them.

In a program on several ranks:

    mesh = distconv.init("sample=2,height=2")
    model = distconv.parallelize(model, mesh)
    y = model(distconv.shard(x, mesh))  # DTensors: shape, slicing and sums mean the whole tensor
    whole = distconv.gather(y)

On one device, within a limit of memory: model = distconv.fit(model, "24GiB")
Or part after part: model = distconv.in_turn(model, "height=8")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distconv.job.hash_seed import settle_seed
from distconv.job.signals import interrupts_are_silent
from distconv.place import is_run
from distconv.private_names import check
from mucudnn.lazily import attributes
from mucudnn.version import VERSION as __version__

if TYPE_CHECKING:
    from distconv.fitting.models import fit, in_turn
    from distconv.model.interface import (
        UnsupportedOperation,
        distributed_script,
        gather,
        init,
        is_first,
        layout,
        open,
        parallelize,
        patched,
        redistribute,
        shard,
        shutdown,
        whole_state,
    )
    from distconv.rules.registry import rule

__all__ = [
    "UnsupportedOperation",
    "__version__",
    "distributed_script",
    "fit",
    "gather",
    "in_turn",
    "init",
    "is_first",
    "layout",
    "open",
    "parallelize",
    "patched",
    "redistribute",
    "rule",
    "shard",
    "shutdown",
    "whole_state",
]

if is_run():
    interrupts_are_silent()
settle_seed()  # before torch is imported, since a rank may start itself anew; nothing happens outside `distconv run`

_ELSEWHERE = {
    "distconv.fitting.models": {"fit", "in_turn"},
    "distconv.rules.registry": {"rule"},
}
_PLACES = {"distconv.model.interface": set(__all__) - {"__version__"}.union(*_ELSEWHERE.values()), **_ELSEWHERE}

__getattr__ = attributes(__name__, _PLACES, check)
