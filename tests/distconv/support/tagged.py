"""Training with tensors of a subclass, which carry what is known of them."""

from __future__ import annotations

from typing import Any

import torch
from small_training import Result, batches, net
from torch import Tensor, nn


class Tagged(Tensor):
    """A tensor that carries what is known of it through every function, as MONAI's MetaTensor does."""

    meta: dict[str, Any]

    @staticmethod
    def of(x: Tensor, **meta: Any) -> Tagged:
        result = x.as_subclass(Tagged)
        result.meta = meta
        return result

    def new_empty(self, size: tuple[int, ...], **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Like MetaTensor's, which takes no other forms of a size."""
        assert isinstance(size, tuple)
        return self.as_subclass(Tensor).new_empty(size, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tagged):
            result.meta = next((arg.meta for arg in args if isinstance(arg, Tagged) and hasattr(arg, "meta")), {})
        return result


def subclasses() -> Result:
    """Inputs and targets of a subclass of Tensor, whose metadata the script reads from its own batch."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (images, labels) in enumerate(batches()):
        x, y = Tagged.of(images, name=f"image{index}"), Tagged.of(labels, name=f"label{index}")
        optimizer.zero_grad()
        result = model(x)
        loss = nn.functional.mse_loss(result, y) + (result - y).abs().mean() + ((y > 0) * result).mean()
        loss.backward()
        optimizer.step()
        assert type(x) is Tagged and x.meta == {"name": f"image{index}"}
        assert type(y) is Tagged and y.meta == {"name": f"label{index}"} and (y + 1).meta == y.meta
        found.append(loss.item())
    return [*found, *model.parameters()]


def classes_of_a_subclass() -> Result:
    """Classes of voxels in a tensor of a subclass, which the rule for three spatial dims keeps for backward."""
    torch.manual_seed(3)
    model, found = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1)).double(), []
    x, y = torch.randn(2, 2, 5, 6, 4, dtype=torch.float64), Tagged.of(torch.randint(4, (2, 5, 6, 4)), name="label")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *model.parameters()]
