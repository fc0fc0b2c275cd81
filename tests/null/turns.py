"""A model in turn on the null card, nothing of it computed: prints what torch's allocator keeps after it, as JSON.

    python tests/null/turns.py [--graph]

With a CUDA graph that multiplies matrices in the stream of the model before.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import distconv
from distconv.agreement.samples import SampledElements

PARTS = 4


class Model(nn.Module):
    """Multiplies matrices between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.middle(self.first(x).movedim(1, -1)).movedim(-1, 1))
        return y


def main() -> None:
    SampledElements.changed = lambda *args: []  # which would be of numbers
    model, x = Model().cuda(), torch.zeros(1, 4, 64, 64, device="cuda")
    graphs, stream = [], torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        if "--graph" in sys.argv:
            torch.mm(x[0, 0], x[0, 0])
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[0], stream=stream):
                torch.mm(x[0, 0], x[0, 0])
        distconv.in_turn(model, f"height={PARTS}")(x)
    kept = [block["size"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"] if _is_used(block)]
    print(json.dumps({"workspaces": sum(size >= 2**24 for size in kept), "graphs": len(graphs)}))


def _is_used(block: dict[str, object]) -> bool:
    return block["state"] == "active_allocated"


if __name__ == "__main__":
    main()
