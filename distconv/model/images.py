"""Images in a list, as detection models take them: they form no batch that a partition could cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.mesh import placements


def refuse_images(value: Any, what: str, mesh: DeviceMesh) -> None:
    """ValueError, one line, for a list of images (channels, height, width) that the mesh cannot partition.

    Tensors (samples, channels, length) in a list are no images: all have one shape, and the mesh none but their axes.
    """
    images = [x for x in value if isinstance(x, Tensor) and x.dim() == 3] if isinstance(value, list | tuple) else []
    if not images:
        return
    try:
        placements(mesh, 3)
        fits = len({x.shape for x in images}) == 1
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{what} is a list of {len(images)} tensors of 3 dims, such as {tuple(images[0].shape)}, as detection"
            f" models take images: each is no batch to be partitioned. Accepted: one tensor (samples, channels,"
            f" spatial dims)."
            f" In a program, parallelize the part that gets one and gather what it gives: distconv.parallelize("
            f"model.backbone, mesh).register_forward_hook(lambda module, x, y: tree_map_only(DTensor, distconv.gather,"
            f" y))"
        )
