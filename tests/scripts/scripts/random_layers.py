"""Dropout, dropped paths and a draw within the model: losses number by number those of one process."""

import torch
from torch import nn


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Dropout(0.3)
        )
        self.mean, self.spread, self.decode = nn.Linear(512, 8), nn.Linear(512, 8), nn.Linear(8, 3 * 16 * 16)

    def forward(self, x):
        hidden = self.encode(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + torch.exp(0.5 * spread) * torch.randn_like(spread)
        if self.training:
            z = z * torch.empty(z.shape[0], 1).bernoulli_(0.9).div_(0.9)
        return self.decode(z).sigmoid().view_as(x), mean, spread


torch.manual_seed(22)
torch.set_default_dtype(torch.float64)
model = Coder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.rand(4, 3, 16, 16)
    again, mean, spread = model(x)
    divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    loss = nn.functional.binary_cross_entropy(again, x, reduction="sum") + divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item() / len(x):.8f} drawn {torch.rand(1).item():.8f}")
model.eval()
with torch.no_grad():
    samples = model.decode(torch.randn(4, 8)).sigmoid()
    print(f"samples {samples.mean():.8f}")
