"""Takes the parameters and buffers of a module a few at a time, so that each comparison covers the next ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.agreement.checksum import checksum
from distconv.agreement.disagreement import Note, Site
from distconv.tensors.layouts import coordinate
from distconv.tensors.mesh import is_the_programs, sharded_dims

BYTES = 1 << 18
"""What a rank looks at in one comparison, or one tensor where that is larger: a fraction of a millisecond on a host."""

TENSORS = 8  # No more tensors than these in one comparison: each costs some ten microseconds.


class Turns:
    """Cycles through the tensors of a module, in the same order on every rank."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, str]] = []
        self._next = 0

    def take(self, module: nn.Module, buffers: bool) -> list[Note[Tensor]]:
        """The next few tensors, all of one layout; none for a module that has none."""
        if self._next >= len(self._places):
            self._places, self._next = list(_around(module, buffers)), 0
        found: list[Note[Tensor]] = []
        size, layout = 0, None
        while self._next < len(self._places) and len(found) < TENSORS and size < BYTES:
            owner, kind, path = self._places[self._next]
            tensor: Tensor | None = getattr(owner(), f"_{kind}s", {}).get(path.rpartition(".")[2])
            if tensor is not None and not tensor.is_meta and not is_the_programs(tensor):
                # What functional_call has put back may have been sharded since: its detach() is the sharded one's.
                here, local, shard = None, tensor.detach(), 0
                if isinstance(local, DTensor):
                    here = mesh, _ = local.device_mesh, local.placements
                    axes = [axis for axis, _ in sharded_dims(*here)]
                    local, shard = local._local_tensor, coordinate(mesh, axes)
                if found and here != layout:
                    break
                layout = here
                site = Site(f"{kind} {path} of {type(module).__name__}", tuple(tensor.shape), str(tensor.dtype), "")
                found.append(Note(site, checksum(local), shard))
                size += local.nbytes
            self._next += 1
        return found


def _around(module: nn.Module, buffers: bool) -> Iterator[tuple[weakref.ref[nn.Module], str, str]]:
    """("parameter" or "buffer", path) of all tensors of a module, each with the module in it that owns it."""
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in inner._parameters:
            yield weakref.ref(inner), "parameter", f"{prefix}{name}"
        for name in inner._buffers if buffers else ():
            yield weakref.ref(inner), "buffer", f"{prefix}{name}"
