"""Pictures of a model: its outputs in a grid, histograms of its weights, a curve of losses."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from networks import UNet
from PIL import Image
from torch import nn

torch.manual_seed(17)
torch.set_default_dtype(torch.float64)
model = UNet(3, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, losses = torch.rand(4, 3, 16, 16), []
for _ in range(4):
    y = model(x)
    loss = nn.functional.mse_loss(y, x.flip(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
figure, axes = plt.subplots(2, 2, figsize=(4, 4))
axes[0, 0].plot(losses)
axes[0, 1].imshow(y[0, 0].detach().cpu())
axes[1, 0].imshow(y[0].detach().permute(1, 2, 0).clamp(0, 1))
counts, edges, _ = axes[1, 1].hist(model.enter[0].weight.detach().flatten().numpy(), bins=8)
figure.savefig("figure.png", dpi=50)
print(*(f"{loss:.8f}" for loss in losses), *counts, *(f"{edge:.8f}" for edge in edges))
images = y.detach()
images = (images - images.min()) / (images.max() - images.min() + 1e-5)
grid = images.new_full((3, 34, 34), 0.0)
for index in range(4):
    row, column = divmod(index, 2)
    grid[:, 1 + 17 * row : 17 + 17 * row, 1 + 17 * column : 17 + 17 * column].copy_(images[index])
array = grid.mul(255).add_(0.5).clamp_(0, 255).permute(1, 2, 0).to("cpu", torch.uint8).numpy()
Image.fromarray(array).save("grid.png")
masks = y.argmax(dim=1)[:, None].byte()
Image.fromarray((masks[0, 0].numpy() * 100).astype(np.uint8)).save("mask.png")
Image.fromarray(np.uint8(np.asarray(images[1, 0]) * 255)).save("channel.png")
print(array.shape, f"{array.mean():.4f}", np.bincount(masks.numpy().ravel()))
