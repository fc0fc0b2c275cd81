"""WGAN-GP: the norm of a gradient is part of the loss, through convolutions and through linear layers."""

import torch
from torch import nn

torch.manual_seed(9)
torch.set_default_dtype(torch.float64)
generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 3 * 8 * 8), nn.Tanh())
critics = {
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    "convolution": nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 1)
    ),
}


def penalty(critic, real, fake):
    alpha = torch.rand(real.shape[0], 1, 1, 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    gradients = torch.autograd.grad(scores, mixed, torch.ones(real.shape[0], 1), create_graph=True, retain_graph=True)[
        0
    ]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for name, critic in critics.items():
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for step in range(4):
        real, z = torch.rand(4, 3, 8, 8), torch.randn(4, 8)
        optimizer_d.zero_grad()
        fake = generator(z).view(4, 3, 8, 8)
        loss_d = -critic(real).mean() + critic(fake).mean() + 10 * penalty(critic, real.data, fake.data)
        loss_d.backward()
        optimizer_d.step()
        if step % 2 == 0:
            optimizer_g.zero_grad()
            loss_g = -critic(generator(z).view(4, 3, 8, 8)).mean()
            loss_g.backward()
            optimizer_g.step()
        print(f"{name} [D loss: {loss_d.item():f}] [G loss: {loss_g.item():f}]")
    real.requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    r1 = gradient.pow(2).reshape(4, -1).sum(1).mean()
    r1.backward()
    print(
        f"R1 {r1.item():.10f} {sum(p.grad.abs().sum().item() for p in critic.parameters() if p.grad is not None):.8f}"
    )
