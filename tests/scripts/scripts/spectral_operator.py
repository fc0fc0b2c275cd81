"""A neural operator: Fourier layers by opt_einsum, errors without gradients, pictures of what it predicts."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import opt_einsum
import torch
from torch import nn

torch.manual_seed(11)


class Spectral(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, modes, dtype=torch.cfloat) / channels)

    def forward(self, x):
        spectrum = torch.fft.rfft2(x, norm="forward")
        out = torch.zeros_like(spectrum)
        low = spectrum[:, :, : self.modes, : self.modes]
        out[:, :, : self.modes, : self.modes] = opt_einsum.contract("bixy,ioxy->boxy", low, self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:], norm="forward")


class Operator(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, channels, 1), nn.Conv2d(channels, 1, 1)
        self.spectral, self.skip = Spectral(channels, 4), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        x = self.lift(x)
        return self.project(nn.functional.gelu(self.spectral(x) + self.skip(x)))


def relative(y, target):
    return torch.sum(torch.linalg.norm((y - target).flatten(1), dim=1) / torch.linalg.norm(target.flatten(1), dim=1))


model = Operator()
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
x = torch.rand(4, 1, 16, 16)
target = x.roll(3, -1) - x.mean()
for _ in range(3):
    optimizer.zero_grad()
    loss = relative(model(x), target)
    loss.backward()
    optimizer.step()
    print(f"train_err={loss.item():.4f}")
model.eval()
with torch.no_grad():
    print(f"eval {relative(model(x[:3]), target[:3]).item() / 3:.4f}")
figure, axes = plt.subplots(1, 2, figsize=(3, 1.5))
for index, axis in enumerate(axes):
    with torch.no_grad():
        out = model(x[index].unsqueeze(0))
    axis.imshow(out.squeeze().numpy())
    print(f"{out.squeeze().numpy().sum():.3f}")
figure.savefig("predictions.png", dpi=50)
