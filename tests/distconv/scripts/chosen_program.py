"""A program whose mesh and strategy are chosen for a model of its own; its ranks print the mesh."""

import copy
import sys

import torch
from torch import Tensor, nn

import distconv


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.between = lambda x: torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


torch.manual_seed(0)
model, x = Network(), torch.randn(4, 3, 16, 16)
plain = copy.deepcopy(model)(x)
mesh = distconv.init("auto")
model = distconv.parallelize(model, mesh, strategy="auto", sample_input=x)
whole = distconv.gather(model(distconv.shard(x, mesh)))
assert torch.allclose(whole, plain, atol=1e-5)
# One write for each rank: an unbuffered print writes the end of the line apart, and another rank may come between.
sys.stdout.write(f"partition {mesh.settled.mesh_dim_names} {tuple(mesh.settled.shape)}\n")
