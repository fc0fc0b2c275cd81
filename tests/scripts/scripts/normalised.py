"""Spectral and weight normalisation, and an orthogonal penalty on the weights themselves."""

import torch
from torch import nn

torch.manual_seed(25)
torch.set_default_dtype(torch.float64)
sn = nn.utils.parametrizations.spectral_norm
discriminator = nn.Sequential(
    sn(nn.Conv2d(3, 8, 3, 2, 1)),
    nn.LeakyReLU(0.1),
    nn.utils.spectral_norm(nn.Conv2d(8, 16, 3, 2, 1)),
    nn.LeakyReLU(0.1),
    nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3, 2, 1)),
    nn.Flatten(),
    sn(nn.Linear(64, 1)),
)
optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
for step in range(4):
    real, fake = torch.rand(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
    loss = nn.functional.relu(1 - discriminator(real)).mean() + nn.functional.relu(1 + discriminator(fake)).mean()
    for module in discriminator:
        if isinstance(module, nn.Conv2d):
            flat = module.weight.view(module.weight.shape[0], -1)
            loss = loss + 1e-3 * ((flat @ flat.T) * (1 - torch.eye(flat.shape[0]))).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} {loss.item():.9f} {discriminator[0].weight.detach().abs().sum().item():.8f}")
torch.save(discriminator.state_dict(), "discriminator.pth")
