"""Graphs of a model: traced before and after training, scripted and trained, probed empty; a scripted function."""

import torch
from networks import classifier
from torch import nn

torch.manual_seed(26)
torch.set_default_dtype(torch.float64)
x, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
network = classifier()
first = torch.jit.trace(network.eval(), x[:1])
print(f"traced {first(x).square().mean().item():.10f} probed {tuple(network(torch.empty(1, 3, 16, 16)).shape)}")
for model in (network.train(), torch.jit.script(classifier())):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.10f}")
y = network.eval()(x)
again = torch.jit.trace(network, x)
print(f"{(again(x) - y).abs().max() < 1e-12} {again(x).square().mean().item():.10f}")
again.save("traced.pt")


@torch.jit.script
def gated(y: torch.Tensor, n: int):
    return torch.tanh(y[:, :n]) * torch.sigmoid(y[:, n:])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return gated(self.layer(x), 2)


gate = Gated()
loss = gate(x).square().mean()
loss.backward()
print(f"gated {loss.item():.10f} {gate.layer.weight.grad.square().sum().item():.10f}")
