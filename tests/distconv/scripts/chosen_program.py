"""A program whose mesh and strategy are chosen for a model of its own; its ranks print the mesh."""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distconv


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm((8, 32, 32))  # has most parameters
        self.between = lambda x: torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.norm(self.first(x))))


torch.manual_seed(0)
model, x = Network(), torch.randn(2, 3, 32, 32)
plain = copy.deepcopy(model)(x)
mesh = distconv.init("auto")
model = distconv.parallelize(model, mesh, strategy="auto", sample_input=x)
whole = distconv.gather(model(distconv.shard(x, mesh)))
assert torch.allclose(whole, plain, atol=1e-5)
sharded = sum(isinstance(p, DTensor) for p in model.parameters())
# One write for each rank: an unbuffered print writes the end of the line apart, and another rank may come between.
sys.stdout.write(
    f"partition {mesh.settled.mesh_dim_names} {tuple(mesh.settled.shape)}, {sharded} parameters in shards\n"
)
