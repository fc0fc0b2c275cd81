"""One step of a model and its results. Run as a module, this is a script that takes the step on every rank."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TASK, LEFT = "task.pickle", "left.pt"  # File names in the folder of a rank: the step to take, and its results.


def leaves_of(model: nn.Module, inputs: Sequence[Any], backward: bool) -> dict[str, Tensor]:
    """The results of a step of `model` by name: outputs, gradients of parameters and inputs, and buffers.

    The loss weighs each element of an output differently, so that elements that change places are noticed. Random
    numbers begin with seed 0; without `backward` the step is the model's call alone, without gradients.
    """
    torch.manual_seed(0)
    with torch.set_grad_enabled(backward):
        outputs = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    wanted = [y for y in outputs if y.requires_grad]
    if wanted:
        sum((_weights(y) * y).sum() for y in wanted).backward()  # type: ignore[union-attr]
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(given) if x.grad is not None}
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape)


def _take(folder: Path) -> None:
    with open(folder / TASK, "rb") as file:
        sys.path[:], task = pickle.load(file)
    torch.save(leaves_of(*pickle.loads(task)), folder / LEFT)


if __name__ == "__main__":
    _take(Path(sys.argv[1]))
