"""Models on several meshes: if a function combines tensors of different meshes, they are redistributed to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from distconv.model.direct.parameters import is_own
from distconv.model.direct.paths import is_in_place, running
from distconv.tensors.arguments import each_of
from distconv.tensors.mesh import is_ours
from distconv.transfer.redistribution import redistributed


def on_mesh(mesh: DeviceMesh, x: DTensor) -> DTensor:
    """A tensor redistributed to a mesh; unchanged if it is on a mesh that the program has made for itself."""
    return x if x.device_mesh == mesh or not is_ours(x.device_mesh) else redistributed(x, mesh)


class OnOneMesh(TorchFunctionMode):
    """Redistributes the tensors that a function combines to the mesh of the calling module, or to that of the tensor
    that the function changes in place."""

    def __init__(self, mesh: Callable[[], DeviceMesh]) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if running.uses is not None and not is_own(func, args, kwargs):
            args, kwargs = running.uses.given(args, kwargs)
        meshes = {x.device_mesh for x in each_of(DTensor, (*args, *kwargs.values()))}
        if len(meshes) < 2 or not all(map(is_ours, meshes)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changed = kwargs.get("out") if "out" in kwargs else args[0] if is_in_place(name) else None
        mesh = next((x.device_mesh for x in each_of(DTensor, (changed,))), self.mesh())
        args, kwargs = tree_map_only(DTensor, lambda x: on_mesh(mesh, x), (args, kwargs))
        return func(*args, **kwargs)
