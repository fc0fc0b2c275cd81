"""Takes the parameters and buffers of a module a few at a time, so that each comparison covers the next ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.agreement.checksum import checksum
from distconv.agreement.comparison import Noted
from distconv.agreement.disagreement import Site
from distconv.tensors.layouts import coordinate
from distconv.tensors.mesh import is_the_programs, sharded_dims

BYTES = 1 << 18
"""What a rank looks at in one comparison, or one tensor where that is larger: a fraction of a millisecond on a host."""

TENSORS = 8
"""No more tensors than these in one comparison: each costs some ten microseconds."""


def state(module: nn.Module, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """("parameter NAME" or "buffer NAME", tensor) of what a module holds on this rank, in one order on all ranks."""
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", parameter
    if buffers:
        for name, buffer in module.named_buffers():
            yield f"buffer {name}", buffer


def shard_of(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor, and the number of its shard: ranks with the same number hold the same."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    mesh, placements = tensor.device_mesh, tensor.placements
    axes = [axis for axis, _ in sharded_dims(mesh, placements)]
    return tensor._local_tensor.detach(), coordinate(mesh, axes)


class Turns:
    """Goes around what a module holds. Which tensors come next depends on nothing but how often it was asked."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, str, str]] = []
        self._next = 0

    def take(self, module: nn.Module, buffers: bool) -> list[Noted]:
        """The next few tensors, all of one layout; none for a module that holds nothing."""
        if self._next >= len(self._places):
            self._places, self._next = list(self._around(module, buffers)), 0
        found: list[Noted] = []
        size, layout = 0, None
        while self._next < len(self._places) and len(found) < TENSORS and size < BYTES:
            owner, kind, name, own = self._places[self._next]
            tensor = _read(owner(), kind, own)
            if tensor is not None:
                here = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
                if found and here != layout:
                    break
                layout = here
                local, shard = shard_of(tensor)
                site = Site(f"{name} of {type(module).__name__}", tuple(tensor.shape), str(tensor.dtype), "")
                found.append(Noted(site, checksum(local), shard))
                size += local.numel() * local.element_size()
            self._next += 1
        return found

    @staticmethod
    def _around(module: nn.Module, buffers: bool) -> Iterator[tuple[weakref.ref[nn.Module], str, str, str]]:
        for path, inner in module.named_modules():
            prefix = f"{path}." if path else ""
            for name in inner._parameters:
                yield weakref.ref(inner), "_parameters", f"parameter {prefix}{name}", name
            for name in inner._buffers if buffers else ():
                yield weakref.ref(inner), "_buffers", f"buffer {prefix}{name}", name


def _read(owner: nn.Module | None, kind: str, name: str) -> Tensor | None:
    held: dict[str, Tensor | None] = getattr(owner, kind, {})
    tensor = held.get(name)
    if tensor is None or tensor.is_meta or is_the_programs(tensor):
        return None
    return tensor
