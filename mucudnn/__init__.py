"""mucudnn: convolutions of an unmodified PyTorch program, divided to run fast within a workspace limit.

    import mucudnn

    mucudnn.patch(workspace_limit="64MiB")  # from here on, torch's convolutions are divided where that is faster
    ...
    for record in mucudnn.report():
        print(record)
    mucudnn.unpatch()

or, without a change to a script, `MUCUDNN_WORKSPACE_LIMIT=64MiB python -m mucudnn run train.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mucudnn.lazily import attributes
from mucudnn.private_names import check_names
from mucudnn.version import VERSION as __version__

if TYPE_CHECKING:
    from mucudnn.convolution.problem import ConvProblem, Direction
    from mucudnn.patching import is_patched, patch, patched, report, unpatch
    from mucudnn.reporting.record import Record

__all__ = ["ConvProblem", "Direction", "Record", "__version__", "is_patched", "patch", "patched", "report", "unpatch"]

__getattr__ = attributes(
    __name__,
    {
        "mucudnn.convolution.problem": ("ConvProblem", "Direction"),
        "mucudnn.patching": ("is_patched", "patch", "patched", "report", "unpatch"),
        "mucudnn.reporting.record": ("Record",),
    },
    check_names,
)
