"""A plain script that compiles its model. Prints losses, sums of gradients and what was compiled after each step.

python compiled.py [BACKEND WAY]...    WAY: function, for torch.compile(model), or method, for model.compile()
"""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


def train(backend: str, way: str) -> list[dict[str, float]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    net = model = Net().double()
    if way == "function":
        model = torch.compile(net, backend=backend, fullgraph=True)
    elif way == "method":
        net.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = []
    for _ in range(4):
        inputs, targets = torch.randn(4, 2, 8, 8).double(), torch.arange(4) % 3
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        found = {"loss": loss.item(), "graphs": counters["stats"]["unique_graphs"]}
        found |= {"compiled": counters["aot_autograd"]["ok"], "breaks": sum(counters["graph_break"].values())}
        found |= {name: p.grad.abs().sum().item() for name, p in net.named_parameters()}
        steps.append(found)
        optimizer.step()
    return steps


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["none", "none"]
    print(json.dumps([train(*pair) for pair in zip(arguments[::2], arguments[1::2], strict=True)]))
