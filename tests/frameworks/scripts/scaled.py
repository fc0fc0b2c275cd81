"""Gradient scaling: a scaler whose scale grows, and which skips the step whose gradients are not finite."""

import torch
from torch import nn

torch.manual_seed(0)
x, labels = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for step in range(5):
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x * (torch.inf if step == 2 else 1)), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    print(f"loss {loss.item():.8f}" if step != 2 else "skipped")
    print(f"scale {scaler.get_scale():.1f}")
print(f"weights {sum(p.double().abs().sum().item() for p in model.parameters()):.6f}")
