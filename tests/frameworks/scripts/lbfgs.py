"""An optimizer that flattens all parameters into one vector."""

import torch
from torch import nn

torch.manual_seed(0)
x, labels = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    return loss


for _ in range(2):
    print(f"loss {optimizer.step(closure).item():.8f}")
