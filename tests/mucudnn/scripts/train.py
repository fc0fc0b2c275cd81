"""A training script that knows nothing of mucudnn; prints losses, then ends as its argument says."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Conv1d(2, 4, 129, padding=64).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x = torch.randn(4, 2, 4096, dtype=torch.float64)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.9f}")
if sys.argv[1:] == ["fail"]:
    raise ValueError("the script fails")
